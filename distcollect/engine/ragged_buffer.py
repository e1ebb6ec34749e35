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
    """Up to 2T frames of each of n rows.

    Attributes:
        num_steps: T.
        position: int64 ``[n]``, frames that each row has.
        chunk: steps that are not among these frames yet.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        """Allocate room for ``2 * num_steps`` frames of each row."""
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self.chunk = StepChunk(layout, num_steps)
        self._frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps) for leaf in layout.per_frame
        }
        # The state leaves after each row's last frame.
        self._after: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.state}
        # The state leaves after frames that end a trajectory: the frames' rows and columns.
        self._finals: list[tuple[np.ndarray, np.ndarray, Arrays]] = []
        # The state leaves after a frame whose successor found no room, by the row and the column
        # that the successor would have had.
        self._cut_off: dict[tuple[int, int], Arrays] = {}

    def last_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that have frames, and the trajectory of the last frame of each."""
        rows = np.flatnonzero(self.position)
        return rows, self._frames[TRAJ_IDS][rows, self.position[rows] - 1]

    def drop(self) -> int:
        """Drop all frames; how many there were."""
        dropped = int(self.position.sum())
        self.position.fill(0)
        self._finals.clear()
        self._cut_off.clear()
        return dropped

    def take_chunk(self, current: Arrays) -> tuple[np.ndarray, int]:
        """Append the frames of the chunk to the rows' frames.

        Args:
            current: ``[n, *shape]`` of the state leaves after the last step.

        Returns:
            The rows that had no room for all of their frames, and the number of frames without
            room.
        """
        chunk, num_steps = self.chunk, self.chunk.num_steps
        if not num_steps:
            return np.zeros(0, np.int64), 0
        room = 2 * self.num_steps
        real = chunk.real[:num_steps]
        # [steps, n]: the column of each frame; fillers have that of the frame after them.
        columns = self.position + real.cumsum(0) - real
        fits = real & (columns < room)
        steps, rows = fits.nonzero()
        at = columns[steps, rows]
        for key, frames in self._frames.items():
            frames[rows, at] = chunk.frames[key][steps, rows]
        for step, of_rows, final in chunk.finals:
            kept = columns[step, of_rows] < room
            self._finals.append(
                (
                    of_rows[kept],
                    columns[step, of_rows[kept]],
                    {key: array[kept] for key, array in final.items()},
                )
            )
        for key, after in self._after.items():
            after[:] = current[key]
        without_room = real & ~fits
        overflow: np.ndarray = without_room.any(0).nonzero()[0]
        for row in overflow.tolist():
            first = int(without_room[:, row].argmax())
            after_row = {key: chunk.frames[key][first, row].copy() for key in self._after}
            self._cut_off.setdefault((row, room), after_row)
        self.position = self.position + fits.sum(0)
        return overflow, int(without_room.sum())

    def cut_short(self, row: int, traj_id: int, after: Arrays) -> None:
        """End a trajectory early: mark its last frame truncated and faulted.

        Nothing happens if the last frame of ``row`` here is of another trajectory.

        Args:
            row: the row of the trajectory.
            traj_id: the id of the trajectory.
            after: ``[n, *shape]`` of the state leaves after that frame.
        """
        last = int(self.position[row]) - 1
        if last >= 0 and self._frames[TRAJ_IDS][row, last] == traj_id:
            self._frames["truncated",][row, last] = True
            self._frames[FAULTED][row, last] = True
            final = {key: array[row][None].copy() for key, array in after.items()}
            self._finals.append((np.array([row]), np.array([last]), final))

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``; where a row has fewer, add padding."""
        steps = self.num_steps
        lengths = np.minimum(self.position, steps)
        longer = self.position > steps
        surplus = int(self.position.max()) - steps
        for key, tail in slab.tail.items():
            tail[:] = self._after[key]
            tail[longer] = self._frames[key][longer, steps]
            for (row, column), cut_off in self._cut_off.items():
                if column == steps:
                    tail[row] = cut_off[key]
        self._cut_off = {
            (row, column - steps): cut_off
            for (row, column), cut_off in self._cut_off.items()
            if column > steps
        }
        for key, frames in self._frames.items():
            slab.frames[key][:] = frames[:, :steps]
            if surplus > 0:
                frames[:, :surplus] = frames[:, steps : steps + surplus]
        later: list[tuple[np.ndarray, np.ndarray, Arrays]] = []
        for rows, columns, final in self._finals:
            now = columns < steps
            slab.add_finals(rows[now], columns[now], {key: x[now] for key, x in final.items()})
            if not now.all():
                of_later = {key: x[~now] for key, x in final.items()}
                later.append((rows[~now], columns[~now] - steps, of_later))
        self._finals = later
        self.position = self.position - lengths
        if (lengths < steps).any():
            slab.pad(lengths, self._after)
