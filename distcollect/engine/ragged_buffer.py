"""A buffer for frames of rows that are not at the same step."""

from __future__ import annotations

import numpy as np

from distcollect.rollout.layout import FAULTED, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class RaggedBuffer:
    """Up to 2T frames of each of n rows, and what is known of the frame that follows them.

    Attributes:
        num_steps: T.
        frames: ``{key: [n, 2T + 1, *shape]}`` of all leaves. In each row the next frame follows the
            finished ones: at least its state leaves are there.
        position: int64 ``[n]``, how many finished frames each row has.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        """Allocate it for frames of this layout; ``num_steps`` is T."""
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self.frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps + 1) for leaf in layout.per_frame
        }
        self._rows = np.arange(layout.num_envs)
        self._state = [leaf.key for leaf in layout.state]
        # The state leaves after frames that end a trajectory, or whose successor was dropped: the
        # frames' rows and columns.
        self._finals: list[tuple[np.ndarray, np.ndarray, Arrays]] = []

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
        return self._drop(np.flatnonzero(self.position), 0)

    def drop_surplus(self, row: int) -> int:
        """Drop the finished frames of a row beyond T, and return how many there were."""
        following = row, self.num_steps
        self._cut_off(*following, {key: self.frames[key][following] for key in self._state})
        return self._drop(np.array([row]), self.num_steps)

    def _cut_off(self, row: int, column: int, after: Arrays) -> None:
        """Keep the state leaves ``[*shape]`` of a dropped frame, as those after the one before."""
        last = column - 1
        if not any(((rows == row) & (at == last)).any() for rows, at, _ in self._finals):
            kept = {key: array[None].copy() for key, array in after.items()}
            self.add_finals(np.array([row]), np.array([last]), kept)

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

    def take(self, chunk: Slab, real: np.ndarray, after: Arrays) -> tuple[np.ndarray, int]:
        """Append the first steps of a chunk.

        Args:
            chunk: the steps, fillers among them.
            real: bool ``[n, number of steps]``, False where a step is a filler.
            after: ``[n, *shape]`` of the state leaves after the last step.

        Returns:
            The rows that had no room for all of their frames, and the number of frames without
            room.
        """
        room = 2 * self.num_steps
        # [n, steps]: the column of each frame; fillers have that of the frame after them.
        columns = self.position[:, None] + real.cumsum(1) - real
        fits = real & (columns < room)
        rows, steps = fits.nonzero()
        at = columns[rows, steps]
        for key, frames in self.frames.items():
            frames[rows, at] = chunk.frames[key][rows, steps]
        rows, steps, final = chunk.finals()
        at = columns[rows, steps]
        kept = at < room
        self.add_finals(rows[kept], at[kept], {key: x[kept] for key, x in final.items()})
        without_room = real & ~fits
        overflow: np.ndarray = without_room.any(1).nonzero()[0]
        for row in overflow.tolist():
            first = int(without_room[row].argmax())
            self._cut_off(row, room, {key: chunk.frames[key][row, first] for key in self._state})
        self.position += fits.sum(1)
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
        for key, tail in slab.tail.items():
            tail[:] = self.frames[key][rows, lengths]
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
