"""The loop for vector envs that give the results of some rows at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import STEPPED
from distcollect.engine.rollout_loop import RolloutLoop
from distcollect.envs.base import Faulted
from distcollect.integrations.envpool.async_batch import AsyncPoolBatch, Received
from distcollect.policy.base import Policy
from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class RowBuffer:
    """Up to 2T frames of each of n rows, and what is known of the frame under way.

    Attributes:
        num_steps: T.
        frames: ``{key: [n, 2T + 1, *shape]}`` of all leaves. In each row the frame under way
            follows the finished ones: its state leaves are there once they are known, the rest
            once its action was chosen.
        position: int64 ``[n]``, how many finished frames each row has.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        """Allocate it."""
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self.frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps + 1) for leaf in layout.per_frame
        }
        self._state = [leaf.key for leaf in layout.state]
        # The state leaves after frames that end a trajectory: the frames' rows and columns.
        self._finals: list[tuple[np.ndarray, np.ndarray, Arrays]] = []
        # The state leaves after the T-th frame, of rows whose later frames were dropped.
        self._cut_off: dict[int, Arrays] = {}

    def add_finals(self, rows: np.ndarray, final: Arrays) -> None:
        """Keep the state leaves ``[m, *shape]`` after the last finished frames of m rows."""
        self._finals.append((rows, self.position[rows] - 1, final))

    def at(self, rows: np.ndarray) -> Arrays:
        """The state leaves of the frames under way of ``rows``."""
        columns = self.position[rows]
        return {key: self.frames[key][rows, columns] for key in self._state}

    def last_ids(self, rows: np.ndarray) -> np.ndarray:
        """The trajectories of the last finished frames of ``rows``, which have some."""
        ids: np.ndarray = self.frames[TRAJ_IDS][rows, self.position[rows] - 1]
        return ids

    def drop(self) -> int:
        """Drop the finished frames; how many there were."""
        return self._drop(np.flatnonzero(self.position), 0)

    def drop_surplus(self, row: int) -> int:
        """Drop the finished frames of a row beyond T; how many there were."""
        if row not in self._cut_off:
            self._cut_off[row] = {
                key: self.frames[key][row, self.num_steps].copy() for key in self._state
            }
        return self._drop(np.array([row]), self.num_steps)

    def _drop(self, rows: np.ndarray, column: int) -> int:
        """Drop the finished frames of ``rows`` from ``column`` on; how many there were."""
        columns = self.position[rows]
        for frames in self.frames.values():
            frames[rows, column] = frames[rows, columns]
        for index, (of_rows, at, final) in enumerate(self._finals):
            kept = ~(np.isin(of_rows, rows) & (at >= column))
            self._finals[index] = of_rows[kept], at[kept], {k: x[kept] for k, x in final.items()}
        if not column:
            self._cut_off.clear()
        self.position[rows] = column
        return int((columns - column).sum())

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``; where a row has fewer, add padding."""
        steps, rows = self.num_steps, np.arange(len(self.position))
        lengths = np.minimum(self.position, steps)
        for key, tail in slab.tail.items():
            tail[:] = self.frames[key][rows, lengths]
            for row, cut_off in self._cut_off.items():
                tail[row] = cut_off[key]
        self._cut_off.clear()
        for key, frames in slab.frames.items():
            frames[:] = self.frames[key][:, :steps]
        later: list[tuple[np.ndarray, np.ndarray, Arrays]] = []
        for of_rows, columns, final in self._finals:
            now = columns < steps
            slab.add_finals(
                of_rows[now], columns[now], {key: array[now] for key, array in final.items()}
            )
            if not now.all():
                rest = {key: array[~now] for key, array in final.items()}
                later.append((of_rows[~now], columns[~now] - steps, rest))
        self._finals = later
        # With the frames under way.
        num_left = int((self.position - lengths).max()) + 1
        is_short = self.position < steps
        under_way = {key: frames[rows, self.position] for key, frames in self.frames.items()}
        for key, frames in self.frames.items():
            frames[:, :num_left] = frames[:, steps : steps + num_left]
            frames[is_short, 0] = under_way[key][is_short]
        self.position -= lengths
        if is_short.any():
            slab.pad(lengths, slab.tail)


@dataclass(eq=False)
class AsyncLoop(RolloutLoop):
    """Fills rollouts of an env whose rows are stepped independently of each other.

    The policy chooses the actions of the rows whose results came, and these rows go to work at
    once; nobody waits for slow rows. A rollout is complete when every row has T frames. What faster
    rows have beyond that waits for the next rollout; a row that is a whole rollout ahead waits
    itself, as long as enough other rows are at work.
    """

    envs: AsyncPoolBatch
    _buffer: RowBuffer | None = field(init=False, default=None)
    # Rows whose frame under way has no action yet.
    _idle: np.ndarray = field(init=False)
    # Rows whose frame under way is dropped when it is finished.
    _outdated: np.ndarray = field(init=False)
    # ``[n, *shape]`` of each leaf of the policy's state, whose own arrays have ``num_ready`` rows.
    _states: Arrays = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        num_envs = self.envs.num_envs
        self._idle = np.zeros(num_envs, bool)
        self._outdated = np.zeros(num_envs, bool)
        state = self.policy_state
        self._states = {leaf.key: leaf.zeros(num_envs) for leaf in state.leaves} if state else {}

    @property
    def surplus(self) -> np.ndarray:
        return super().surplus if self._buffer is None else self._buffer.position.copy()

    def abandon(self) -> None:
        if self._buffer is not None:
            self._buffer.drop()

    def drop_surplus(self) -> None:
        """Called when all rows were reset, too."""
        if self._buffer is not None:
            self.counter.lose("row_skew", self._buffer.drop())
        self._idle.fill(False)
        self._outdated.fill(False)

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        buffer = self._buffer_for(slab.num_steps, fresh=fresh)
        self._send_idle(buffer, policy)
        goes_on = True
        while goes_on and buffer.position.min() < buffer.num_steps:
            goes_on = self._step(buffer, policy, fresh=fresh)
        buffer.emit(slab)

    def _buffer_for(self, num_steps: int, *, fresh: bool) -> RowBuffer:
        old = buffer = self._buffer
        if buffer is None or buffer.num_steps != num_steps:
            buffer = self._buffer = RowBuffer(self.layout, num_steps)
        if old is not None and (fresh or old is not buffer):
            # A trajectory can't span the gap that dropped frames leave.
            dropped = np.flatnonzero(old.position)
            self.trajectories.cut_before(dropped, old.last_ids(dropped))
            self.counter.lose("row_skew", old.drop())
            for key, frames in buffer.frames.items():
                frames[:, 0] = old.frames[key][:, 0]
            buffer.frames[TRAJ_IDS][dropped, 0] = self.trajectories.ids[dropped]
        if old is not None and fresh:
            is_old = buffer.frames[POLICY_VERSION][:, 0] != self.weights.version
            self._outdated |= is_old & ~self._idle
        return buffer

    def _step(self, buffer: RowBuffer, policy: Policy, *, fresh: bool) -> bool:
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

    def _take(self, buffer: RowBuffer, received: Received) -> np.ndarray:
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
            buffer.add_finals(rows[over], {key: x[over] for key, x in self.current.items()})
            self._begin_trajectories(rows[ended])
            if self.recovery.streaks:
                self.recovery.episodes_ended(rows[ended].tolist())
            self.envs.reset_rows(rows[ended])
        if self.policy_state is not None:
            self.policy_state.begin(np.flatnonzero(received.is_first).tolist())
        can_act: np.ndarray = np.flatnonzero((received.is_frame & ~ended) | received.is_first)
        self._write_starts(buffer, rows[can_act], can_act)
        return can_act

    def _begin_trajectories(self, rows: np.ndarray) -> None:
        self.trajectories.new_ids(rows)
        self.trajectories.lengths[rows] = 0

    def _write_starts(self, buffer: RowBuffer, rows: np.ndarray, slots: np.ndarray) -> None:
        self._idle[rows] = True
        columns = buffer.position[rows]
        for leaf in self.layout.state:
            buffer.frames[leaf.key][rows, columns] = self.current[leaf.key][slots]
        for key, states in self._states.items():
            states[rows] = self.current[key][slots]

    def _without_waiting(
        self, buffer: RowBuffer, rows: np.ndarray, slots: np.ndarray, *, fresh: bool
    ) -> np.ndarray:
        """``slots`` without those of rows that are far ahead and wait."""
        furthest = buffer.num_steps if fresh else 2 * buffer.num_steps
        ahead = slots[buffer.position[rows[slots]] >= furthest]
        if not len(ahead):
            return slots
        # All idle rows but those of the slots wait already.
        num_waiting = int(np.count_nonzero(self._idle)) - len(slots)
        room = max(0, self.envs.num_envs - self.envs.num_ready - num_waiting)
        for row in rows[ahead[room:]].tolist():
            if buffer.position[row] >= 2 * buffer.num_steps:
                at = np.array([row])
                self.trajectories.cut_before(at, buffer.last_ids(at))
                self.counter.lose("row_skew", buffer.drop_surplus(row))
        without: np.ndarray = np.setdiff1d(slots, ahead[:room])
        return without

    def _send_idle(self, buffer: RowBuffer, policy: Policy) -> None:
        """Give an action to the rows that have waited, ``num_ready`` at a time."""
        idle = np.flatnonzero(self._idle)
        size = self.envs.num_ready
        for begin in range(0, len(idle), size):
            rows = idle[begin : begin + size]
            slots = np.arange(len(rows))
            for key, starts in buffer.at(rows).items():
                self.current[key][slots] = starts
            try:
                self._choose(buffer, policy, rows, slots)
            except Faulted as faulted:
                self._recover(buffer, faulted)
                return

    def _choose(
        self, buffer: RowBuffer, policy: Policy, rows: np.ndarray, slots: np.ndarray
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
        frames[TRAJ_IDS][rows, columns] = self.trajectories.ids[rows]
        frames[POLICY_VERSION][rows, columns] = self.weights.version
        for key, states in self._states.items():
            states[rows] = self.current[key][slots]
        self.clip(action)
        self._idle[rows] = False
        self.envs.send(rows, action)

    def _recover(self, buffer: RowBuffer, faulted: Faulted) -> None:
        """Replace the env after it raised: the frames under way are lost."""
        for fault in faulted.faults:
            self.recovery.rebuild(fault)
        rows = np.arange(self.envs.num_envs)
        last = np.maximum(buffer.position - 1, 0)
        frames, ids = buffer.frames, self.trajectories.ids
        cut = (buffer.position > 0) & (frames[TRAJ_IDS][rows, last] == ids)
        cut &= ~(frames["terminated",][rows, last] | frames["truncated",][rows, last])
        at = rows[cut]
        frames["truncated",][at, last[cut]] = True
        frames[FAULTED][at, last[cut]] = True
        buffer.add_finals(at, buffer.at(at))
        self._begin_trajectories(rows)
        self._idle.fill(False)
        self._outdated.fill(False)
