"""The loop for vector envs that give the results of some rows at a time."""

from __future__ import annotations

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import STEPPED
from distcollect.engine.base import EngineBase
from distcollect.engine.ragged_buffer import RaggedBuffer
from distcollect.engine.rollout_loop import RolloutLoop, Trajectories
from distcollect.envs.base import Faulted
from distcollect.integrations.envpool.async_batch import AsyncPoolBatch, Received
from distcollect.policy.base import Policy
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class AsyncLoop(RolloutLoop):
    """Fills rollouts of an env whose rows are stepped independently of each other.

    The policy chooses the actions of the rows whose results came, and these rows go to work at
    once; nobody waits for slow rows. A rollout is complete when every row has T frames. What faster
    rows have beyond that waits for the next rollout; a row that is a whole rollout ahead waits
    itself, as long as enough other rows are at work.
    """

    envs: AsyncPoolBatch

    def __init__(
        self, engine: EngineBase, policy_state: PolicyState | None, trajectories: Trajectories
    ) -> None:
        super().__init__(engine, policy_state, trajectories)
        num_envs = self.envs.num_envs
        # Rows whose frame under way has no action yet.
        self._idle = np.zeros(num_envs, bool)
        # Rows whose frame under way is dropped when it is finished.
        self._outdated = np.zeros(num_envs, bool)
        # ``[n, *shape]`` of each leaf of the policy's state after the last action of each row; the
        # policy's own arrays have ``num_ready`` rows.
        state = policy_state.leaves if policy_state else ()
        self._states: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in state}

    def drop_waiting(self) -> int:
        self._idle.fill(False)
        self._outdated.fill(False)
        return super().drop_waiting()

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        buffer = self._buffer_for(slab.num_steps, fresh=fresh)
        self._send_idle(buffer, policy)
        goes_on = True
        while goes_on and buffer.position.min() < buffer.num_steps:
            goes_on = self._step(buffer, policy, fresh=fresh)
        buffer.emit(slab)

    def _buffer_for(self, num_steps: int, *, fresh: bool) -> RaggedBuffer:
        is_first = self._buffer is None
        buffer = super()._buffer_for(num_steps, fresh=fresh)
        if fresh and not is_first:
            is_old = buffer.frames[POLICY_VERSION][:, 0] != self.weights.version
            self._outdated |= is_old & ~self._idle
        return buffer

    def _step(self, buffer: RaggedBuffer, policy: Policy, *, fresh: bool) -> bool:
        """Take the results of some rows, and give these rows an action; False: it ends here."""
        due = self.interrupts.pending or (
            self.weights.pending and self.options.swap_within_rollouts
        )
        # A rollout has at least one frame.
        if due and self.between_steps() and buffer.position.any():
            return False
        timer = self.step_timer
        begin = clock_ns()
        try:
            received = self.envs.receive()
            middle = clock_ns()
            can_act = self._take(buffer, received)
            if len(slots := self._without_waiting(buffer, received.rows, can_act, fresh=fresh)):
                self._choose(buffer, policy, received.rows[slots], slots)
        except Faulted as faulted:
            self._recover(buffer, faulted)
            return True
        end = clock_ns()
        # As if the policy had come first: only the durations count.
        timer.timed(begin, begin + end - middle, end, 1)
        return True

    def _take(self, buffer: RaggedBuffer, received: Received) -> np.ndarray:
        """Write the ends of frames and the starts of the next.

        Returns:
            int64: the slots of the rows that need an action.
        """
        rows, trajectories, frames = received.rows, self.trajectories, buffer.frames
        # Their action was chosen before all envs were reset, or with weights that are too old now.
        unwanted = ~(received.is_frame | received.is_first)
        unwanted |= received.is_frame & self._outdated[rows]
        self._outdated[rows] = False
        slots = np.flatnonzero(received.is_frame & ~unwanted)
        done = rows[slots]
        at = buffer.position[done]
        cut = np.zeros(len(rows), bool)
        if self.options.max_frames_per_traj is not None:
            trajectories.lengths[done] += 1
            cut[slots] = trajectories.lengths[done] >= self.options.max_frames_per_traj
        truncated = received.truncated | (cut & ~received.terminated)
        frames["reward",][done, at] = received.reward[slots]
        frames["terminated",][done, at] = received.terminated[slots]
        frames["truncated",][done, at] = truncated[slots]
        frames[FAULTED][done, at] = False
        frames[TRAJ_IDS][done, at] = trajectories.ids[done]
        buffer.position[done] += 1
        num_unwanted = int(np.count_nonzero(unwanted))
        self.counter.cells[STEPPED] += len(slots) + num_unwanted
        if num_unwanted:
            self.counter.lose("row_skew", num_unwanted)
            outdated = rows[unwanted & received.is_frame]
            trajectories.cut_before(outdated, trajectories.ids[outdated])
        for key, states in self._states.items():
            self.current[key][:] = states[rows]
        ended = received.is_frame & (received.terminated | truncated)
        if ended.any():
            over = np.flatnonzero(ended & ~unwanted)
            last = buffer.position[rows[over]] - 1
            buffer.add_finals(rows[over], last, {key: x[over] for key, x in self.current.items()})
            trajectories.begin(rows[ended])
            if self.recovery.streaks:
                self.recovery.episodes_ended(rows[ended].tolist())
            self.envs.reset_rows(rows[ended])
        if self.policy_state is not None:
            self.policy_state.begin(np.flatnonzero(received.is_first).tolist())
        can_act: np.ndarray = np.flatnonzero((received.is_frame & ~ended) | received.is_first)
        starting = rows[can_act]
        self._idle[starting] = True
        for leaf in self.layout.state:
            frames[leaf.key][starting, buffer.position[starting]] = self.current[leaf.key][can_act]
        return can_act

    def _without_waiting(
        self, buffer: RaggedBuffer, rows: np.ndarray, slots: np.ndarray, *, fresh: bool
    ) -> np.ndarray:
        """Return ``slots`` without those of rows that are far ahead and wait."""
        furthest = buffer.num_steps if fresh else 2 * buffer.num_steps
        ahead = slots[buffer.position[rows[slots]] >= furthest]
        if not len(ahead):
            return slots
        # All idle rows but those of the slots wait already.
        num_waiting = int(np.count_nonzero(self._idle)) - len(slots)
        room = max(0, self.envs.num_envs - self.envs.num_ready - num_waiting)
        for row in rows[ahead[room:]].tolist():
            if buffer.position[row] >= 2 * buffer.num_steps:
                last = buffer.frames[TRAJ_IDS][row, buffer.position[row] - 1]
                self.trajectories.cut_before(np.array([row]), last)
                self.counter.lose("row_skew", buffer.drop_surplus(row))
        without: np.ndarray = np.setdiff1d(slots, ahead[:room])
        return without

    def _send_idle(self, buffer: RaggedBuffer, policy: Policy) -> None:
        """Give an action to the rows that have waited, ``num_ready`` at a time."""
        idle = np.flatnonzero(self._idle)
        size = self.envs.num_ready
        for begin in range(0, len(idle), size):
            rows = idle[begin : begin + size]
            slots = np.arange(len(rows))
            for key, starts in buffer.starts(rows).items():
                self.current[key][slots] = starts
            try:
                self._choose(buffer, policy, rows, slots)
            except Faulted as faulted:
                self._recover(buffer, faulted)
                return

    def _choose(
        self, buffer: RaggedBuffer, policy: Policy, rows: np.ndarray, slots: np.ndarray
    ) -> None:
        """Choose the actions of ``rows``, whose observations are in ``slots``, and send them."""
        frames, columns = buffer.frames, buffer.position[rows]
        chosen, written = policy()
        action: Arrays = {}
        for leaf, value in zip(self.layout.action, chosen, strict=True):
            frames[leaf.key][rows, columns] = value[slots]
            action[leaf.key] = frames[leaf.key][rows, columns]
        for index, leaf in enumerate(self.layout.extras):
            # A random policy writes none.
            frames[leaf.key][rows, columns] = written[index][slots] if written else 0
        frames[POLICY_VERSION][rows, columns] = self.weights.version
        for key, states in self._states.items():
            states[rows] = self.current[key][slots]
        self.clip(action)
        self._idle[rows] = False
        self.envs.send(rows, action)

    def _recover(self, buffer: RaggedBuffer, faulted: Faulted) -> None:
        """Replace the env after it raised: the frames under way are lost."""
        for fault in faulted.faults:
            self.recovery.rebuild(fault)
        buffer.cut_short(np.arange(self.envs.num_envs), self.trajectories.ids)
        self.trajectories.begin(np.arange(self.envs.num_envs))
        self._idle.fill(False)
        self._outdated.fill(False)
