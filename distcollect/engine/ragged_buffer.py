"""A buffer for frames of rows that are not at the same step."""

from __future__ import annotations

import numpy as np

from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class StepChunk:
    """Steps of n rows as they are made, fillers among them: at most T.

    Attributes:
        frames: ``{key: [T, n, *shape]}`` of all leaves; the next five are parts of it.
        reward: float32.
        terminated: bool; written only where a trajectory ends, as ``truncated`` is.
        truncated: bool.
        traj_ids: int64.
        policy_version: int64.
        real: bool ``[T, n]``, False where a step is a filler.
        num_steps: how many steps there are.
        finals: the state leaves after frames that end a trajectory: their step, their rows, and
            ``[number of rows, *shape]`` of each leaf.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        """Allocate room for ``num_steps`` steps."""
        self.frames: Arrays = {
            leaf.key: leaf.zeros(num_steps, layout.num_envs) for leaf in layout.per_frame
        }
        self.reward = self.frames["reward",]
        self.terminated = self.frames["terminated",]
        self.truncated = self.frames["truncated",]
        self.traj_ids = self.frames[TRAJ_IDS]
        self.policy_version = self.frames[POLICY_VERSION]
        self.real = np.ones((num_steps, layout.num_envs), bool)
        self.num_steps = 0
        self.finals: list[tuple[int, np.ndarray, Arrays]] = []
        self._state = [leaf.key for leaf in layout.state]

    def begin(self, policy_version: int) -> None:
        """Begin with the first step; frames have this version until another one is written."""
        self.num_steps = 0
        self.finals.clear()
        self.real.fill(True)
        self.terminated.fill(False)
        self.truncated.fill(False)
        self.policy_version.fill(policy_version)

    def add_finals(self, rows: np.ndarray, step: int, final: Arrays) -> None:
        """Keep the state leaves after the last frames of the episodes that ended in ``rows``."""
        self.finals.append((step, rows, {key: array[rows] for key, array in final.items()}))

    def starts_of_next(self) -> Arrays:
        """``[n, *shape]`` of the state leaves as they were before the step after the last."""
        return {key: self.frames[key][self.num_steps] for key in self._state}


class RaggedBuffer:
    """Up to 2T frames of each of n rows, and what is known of the frame that follows them.

    Attributes:
        num_steps: T.
        frames: ``{key: [n, 2T + 1, *shape]}`` of all leaves. In each row the next frame follows the
            finished ones: at least its state leaves are there.
        position: int64 ``[n]``, how many finished frames each row has.
    """

    def __init__(self, layout: Layout, num_steps: int, before: RaggedBuffer | None = None) -> None:
        """Allocate it.

        Args:
            layout: of the frames.
            num_steps: T.
            before: an empty buffer, whose next frames are the next ones here.
        """
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self.frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps + 1) for leaf in layout.per_frame
        }
        if before is not None:
            for key, frames in self.frames.items():
                frames[:, 0] = before.frames[key][:, 0]
        self._rows = np.arange(layout.num_envs)
        self._state = [leaf.key for leaf in layout.state]
        # The state leaves after frames that end a trajectory: the frames' rows and columns.
        self._finals: list[tuple[np.ndarray, np.ndarray, Arrays]] = []
        # The state leaves after a frame whose successor was dropped, by the row and the column that
        # the successor would have had.
        self._cut_off: dict[tuple[int, int], Arrays] = {}

    def starts(self, rows: np.ndarray) -> Arrays:
        """Return the state leaves of the next frames of ``rows``."""
        columns = self.position[rows]
        return {key: self.frames[key][rows, columns] for key in self._state}

    def last_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have frames, and the trajectory of the last frame of each."""
        rows = np.flatnonzero(self.position)
        return rows, self.frames[TRAJ_IDS][rows, self.position[rows] - 1]

    def add_finals(self, rows: np.ndarray, columns: np.ndarray, final: Arrays) -> None:
        """Keep the state leaves ``[m, *shape]`` after m frames that end a trajectory."""
        self._finals.append((rows, columns, final))

    def drop(self) -> int:
        """Drop the finished frames, and return how many there were."""
        self._cut_off.clear()
        return self._drop(np.flatnonzero(self.position), 0)

    def drop_surplus(self, row: int) -> int:
        """Drop the finished frames of a row beyond T, and return how many there were."""
        at = row, self.num_steps
        self._cut_off.setdefault(at, {key: self.frames[key][at].copy() for key in self._state})
        return self._drop(np.array([row]), self.num_steps)

    def _drop(self, rows: np.ndarray, column: int) -> int:
        """Drop the finished frames of ``rows`` from ``column`` on."""
        columns = self.position[rows]
        for frames in self.frames.values():
            frames[rows, column] = frames[rows, columns]
        for index, (of_rows, at, final) in enumerate(self._finals):
            kept = ~(np.isin(of_rows, rows) & (at >= column))
            self._finals[index] = of_rows[kept], at[kept], {k: x[kept] for k, x in final.items()}
        self.position[rows] = column
        return int((columns - column).sum())

    def take(self, chunk: StepChunk, after: Arrays) -> tuple[np.ndarray, int]:
        """Append the frames of a chunk.

        Args:
            chunk: the steps.
            after: ``[n, *shape]`` of the state leaves after the last step.

        Returns:
            The rows that had no room for all of their frames, and the number of frames without
            room.
        """
        num_steps, room = chunk.num_steps, 2 * self.num_steps
        if not num_steps:
            return np.zeros(0, np.int64), 0
        real = chunk.real[:num_steps]
        # [steps, n]: the column of each frame; fillers have that of the frame after them.
        columns = self.position + real.cumsum(0) - real
        fits = real & (columns < room)
        steps, rows = fits.nonzero()
        at = columns[steps, rows]
        for key, frames in self.frames.items():
            frames[rows, at] = chunk.frames[key][steps, rows]
        for step, of_rows, final in chunk.finals:
            kept = columns[step, of_rows] < room
            at = columns[step, of_rows[kept]]
            self.add_finals(of_rows[kept], at, {key: array[kept] for key, array in final.items()})
        without_room = real & ~fits
        overflow: np.ndarray = without_room.any(0).nonzero()[0]
        for row in overflow.tolist():
            first = int(without_room[:, row].argmax())
            after_row = {key: chunk.frames[key][first, row].copy() for key in self._state}
            self._cut_off.setdefault((row, room), after_row)
        self.position += fits.sum(0)
        for key in self._state:
            self.frames[key][self._rows, self.position] = after[key]
        return overflow, int(without_room.sum())

    def cut_short(self, rows: np.ndarray, traj_ids: np.ndarray) -> None:
        """End trajectories early: mark the last frames of ``rows`` truncated and faulted.

        Nothing happens in a row whose last frame here is of another trajectory than ``traj_ids``.
        """
        last = self.position[rows] - 1
        is_cut = (last >= 0) & (self.frames[TRAJ_IDS][rows, last] == traj_ids)
        rows, last = rows[is_cut], last[is_cut]
        self.frames["truncated",][rows, last] = True
        self.frames[FAULTED][rows, last] = True
        self.add_finals(rows, last, self.starts(rows))

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``; where a row has fewer, add padding."""
        steps, rows = self.num_steps, self._rows
        lengths = np.minimum(self.position, steps)
        cut_off, self._cut_off = self._cut_off, {}
        for key, tail in slab.tail.items():
            tail[:] = self.frames[key][rows, lengths]
        for (row, column), after in cut_off.items():
            if column > steps:
                self._cut_off[row, column - steps] = after
                continue
            for key, tail in slab.tail.items():
                tail[row] = after[key]
        finals, self._finals = self._finals, []
        for of_rows, columns, final in finals:
            now = columns < steps
            slab.add_finals(of_rows[now], columns[now], {key: x[now] for key, x in final.items()})
            if not now.all():
                of_later = {key: x[~now] for key, x in final.items()}
                self.add_finals(of_rows[~now], columns[~now] - steps, of_later)
        num_left = int((self.position - lengths).max()) + 1  # with the next frames
        is_short = self.position < steps
        for key, frames in self.frames.items():
            slab.frames[key][:] = frames[:, :steps]
            following = frames[is_short, self.position[is_short]]
            frames[:, :num_left] = frames[:, steps : steps + num_left]
            frames[is_short, 0] = following
        self.position -= lengths
        if is_short.any():
            slab.pad(lengths, slab.tail)
