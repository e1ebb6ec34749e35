"""The loop for vector envs whose rows are not at the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distcollect.engine.aligned_loop import AlignedLoop
from distcollect.engine.base import EngineBase
from distcollect.engine.ragged_buffer import RaggedBuffer, StepLog
from distcollect.engine.trajectories import Trajectories
from distcollect.envs.base import Faulted, Step
from distcollect.policy.base import Policy
from distcollect.policy.recurrent import IS_FIRST
from distcollect.rollout.layout import POLICY_VERSION
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class RaggedLoop(AlignedLoop):
    """Fills rollouts of envs whose rows make their frames at different steps.

    These are vector envs that reset a row one step after its end, which is a filler and no frame;
    and those that give the results of some rows at a time. All steps are written to a slab as they
    come, in chunks. Then a buffer sorts the frames out, for all rows at once. It goes on until
    every row has T frames. What faster rows have beyond that waits for the next rollout. A row that
    is a whole rollout ahead waits itself, as long as enough other rows are at work.
    """

    _buffer: RaggedBuffer | None = None
    _chunk: Slab
    _log: StepLog
    _faulted: Faulted | None = None  # it ended the chunk

    def __init__(self, engine: EngineBase, policy: Policy, trajectories: Trajectories) -> None:
        super().__init__(engine, policy, trajectories)
        self._states = self._states_of_slots()

    def _states_of_slots(self) -> Arrays:
        """Return ``[n, *shape]`` of each leaf of the policy's state, from that of the m slots.

        Nothing, if slots always stand for the same rows.
        """
        state, slots = self.policy.state, np.arange(self.envs.num_envs) % self.envs.num_ready
        if state is None or len(slots) == self.envs.num_ready:
            return {}
        return {key: array[slots] for key, array in state.carried.items()}

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        envs, timer, num_steps = self.envs, self.engine.step_timer, slab.num_steps
        if self._buffer is None or self._buffer.num_steps != num_steps:
            # It may be another number only if all envs were reset since the last rollout.
            self._buffer = RaggedBuffer(self.engine.layout, num_steps)
            of_slots = replace(self.engine.layout, batch_size=(envs.num_ready,))
            self._chunk = Slab(of_slots, num_steps + 1)
            self._log = StepLog(num_steps, envs.num_ready)
        buffer = self._buffer
        if fresh:
            self._drop_old(buffer)
        if envs.resume():
            self._load_states()
        furthest = num_steps if fresh else 2 * num_steps
        goes_on = True
        while goes_on and (missing := buffer.missing()).any():
            waits = envs.hold(buffer.position >= furthest)
            # After fewer steps the slowest row has not T frames,
            count = max(missing.max(), -(-missing.sum() // envs.num_ready))
            if np.count_nonzero(waits) < envs.num_envs - envs.num_ready:
                # and no other row is to wait.
                count = min(count, max(1, (furthest - buffer.position[~waits]).min()))
            goes_on = self._fill_chunk(buffer, policy, min(int(count), num_steps))
        timer.due += num_steps  # it counts from the rollout's begin
        buffer.emit(slab)

    @property
    def num_waiting(self) -> int:
        return 0 if self._buffer is None else int(self._buffer.position.sum())

    def drop_waiting(self) -> int:
        buffer = self._buffer
        if buffer is None:
            return 0
        buffer.pending.fill(False)
        num_outdated, self.envs.num_outdated = self.envs.num_outdated, 0
        self.engine.counter.add(num_outdated)
        return buffer.drop() + num_outdated

    def begin_all(self) -> None:
        super().begin_all()
        self._states = self._states_of_slots()

    def renew_states(self) -> None:
        if not self._states or self.policy.state is None:
            super().renew_states()
            return
        rows = self._states[IS_FIRST][:, 0].nonzero()[0]  # also of those in no slot
        for key, initial in self.policy.state.initial().items() if len(rows) else ():
            self._states[key][rows] = initial[rows % self.envs.num_ready]
        self._load_states()

    def _drop_old(self, buffer: RaggedBuffer) -> None:
        """Drop the frames of the last rollout, and those that begun with older weights."""
        counter, trajectories = self.engine.counter, self.trajectories
        # A trajectory can't span the gap that dropped frames leave.
        trajectories.cut_before(*buffer.last_ids())
        counter.lose("row_skew", buffer.drop())
        is_old = buffer.frames[POLICY_VERSION][:, 0] != self.engine.weights.version
        rows = np.flatnonzero(buffer.pending & is_old)
        trajectories.cut_before(rows, trajectories.ids[rows])
        counter.add(len(rows))
        counter.lose("row_skew", len(rows))
        buffer.pending[rows] = False
        self.envs.ignore(rows)

    def _fill_chunk(self, buffer: RaggedBuffer, policy: Policy, num_steps: int) -> bool:
        """Make some steps, and append their frames to the buffer; False: the rollout ends here."""
        engine, envs, chunk, log = self.engine, self.envs, self._chunk, self._log
        chunk.clear()
        if not policy.extras:  # a random one, which writes none
            for array in chunk.extras.values():
                array.fill(0)
        log.rows[:] = envs.rows
        log.acting.fill(True)
        log.acting[0] = envs.acting
        log.real.fill(True)
        self._faulted = None
        num_made = self._make_steps(chunk, policy, num_steps)
        # The next chunk of this rollout begins at its own step 0.
        engine.step_timer.due = max(0, engine.step_timer.due - num_made)
        faulted = self._faulted
        # What envs that raised have left is no start of a frame.
        for key, column in chunk.root.items() if faulted is None else ():
            column[:, num_made] = self.current[key]
        num_dropped = buffer.take(chunk, log, num_made, self.trajectories)
        engine.counter.lose("row_skew", num_dropped)
        if faulted is None:
            return num_made == num_steps
        engine.recovery.rebuild_all(faulted.faults)
        buffer.cut_short(self.trajectories)
        self.begin_all()
        return True

    def _end_episodes(self, slab: Slab, step: int, result: Step) -> None:
        envs, log = self.envs, self._log
        log.acting[step + 1] = envs.acting
        if result.real is not None:
            log.real[step] = result.real
        if envs.num_ready == envs.num_envs:
            super()._end_episodes(slab, step, result)
            if result.real is not None:
                # A filler step does not belong to the episode that follows it.
                self._forget(np.flatnonzero(~result.real).tolist())
            return
        log.rows[step + 1] = envs.rows
        acted = log.acting[step]
        for key, states in self._states.items():
            states[log.rows[step, acted]] = self.current[key][acted]
        self._load_states()
        super()._end_episodes(slab, step, result)
        # What ended with a frame that was dropped is followed by no rest of an episode.
        dropped = [slot for slot in result.ended if not log.real[step, slot]]
        self.trajectories.begin(envs.rows[dropped])

    def _load_states(self) -> None:
        """Show the policy its state for the rows that are in the slots now."""
        for key, states in self._states.items():
            self.current[key][:] = states[self.envs.rows]

    def _forget(self, rows: Sequence[int]) -> None:
        super()._forget(rows)
        for key, states in self._states.items():
            states[self.envs.rows[rows]] = self.current[key][rows]

    def _recover(self, slab: Slab, step: int, policy: Policy, faulted: Faulted) -> int | None:
        self._faulted = faulted
        return None
