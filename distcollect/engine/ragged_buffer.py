"""A buffer for frames of rows that are not at the same step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcollect.rollout.layout import FAULTED, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays

# A frame's row, and its place in that row of the buffer.
_Place = tuple[int, int]


class RaggedBuffer:
    """Up to 2T frames of each of n rows.

    Attributes:
        num_steps: T.
        position: int64 ``[n]``, frames that each row has.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        """Allocate room for ``2 * num_steps`` frames of each row."""
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self._frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps) for leaf in layout.per_frame
        }
        # The carried leaves after each row's last frame.
        self._after: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.carried}
        # The carried leaves after frames that end a trajectory.
        self._final: dict[_Place, Arrays] = {}
        # The carried leaves after a frame whose successor found no room, by the place that the
        # successor would have had.
        self._cut_off: dict[_Place, Arrays] = {}

    def drop(self) -> int:
        """Drop all frames; how many there were."""
        dropped = int(self.position.sum())
        self.position.fill(0)
        self._final.clear()
        self._cut_off.clear()
        return dropped

    def write(
        self,
        real: np.ndarray,
        values: Arrays,
        current: Arrays,
        final: Arrays,
        ended: Sequence[int],
    ) -> list[int]:
        """Append a frame to each row in ``real``; returns the rows that had no room for it.

        Args:
            real: bool ``[n]``.
            values: ``[n, *shape]`` of all leaves of the frame.
            current: ``[n, *shape]`` of the carried leaves after the frame.
            final: the same for the rows in ``ended``, as they were before the reset.
            ended: the rows whose episodes ended with the frame.
        """
        room = self.position < 2 * self.num_steps
        overflow = [int(row) for row in np.flatnonzero(real & ~room)]
        for row in overflow:
            after_row = {key: after[row].copy() for key, after in self._after.items()}
            self._cut_off.setdefault((row, 2 * self.num_steps), after_row)
        rows = np.flatnonzero(real & room)
        columns = self.position[rows]
        for key, frames in self._frames.items():
            frames[rows, columns] = values[key][rows]
        for key, after in self._after.items():
            after[rows] = current[key][rows]
        for row in ended:
            if room[row]:
                self._final[row, int(self.position[row])] = {
                    key: array[row].copy()[None] for key, array in final.items()
                }
        self.position[rows] += 1
        return overflow

    def cut_short(self, row: int, traj_id: int, after: Arrays) -> None:
        """End a trajectory early: mark its last frame truncated and faulted.

        Nothing happens if the last frame of ``row`` here is of another trajectory.

        Args:
            row: the row of the trajectory.
            traj_id: the id of the trajectory.
            after: ``[n, *shape]`` of the carried leaves after that frame.
        """
        last = int(self.position[row]) - 1
        if last >= 0 and self._frames[TRAJ_IDS][row, last] == traj_id:
            self._frames["truncated",][row, last] = True
            self._frames[FAULTED][row, last] = True
            self._final[row, last] = {key: array[row].copy()[None] for key, array in after.items()}

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``; where a row has fewer, add padding."""
        steps = self.num_steps
        lengths = np.minimum(self.position, steps)
        longer = self.position > steps
        for key, tail in slab.tail.items():
            tail[:] = self._after[key]
            tail[longer] = self._frames[key][longer, steps]
            for (row, column), after in self._cut_off.items():
                if column == steps:
                    tail[row] = after[key]
        self._cut_off = {
            (row, column - steps): after
            for (row, column), after in self._cut_off.items()
            if column > steps
        }
        for key, frames in self._frames.items():
            slab.frames[key][:] = frames[:, :steps]
            frames[:, :steps] = frames[:, steps:]
        kept: dict[_Place, Arrays] = {}
        for (row, column), final in sorted(self._final.items()):
            if column < steps:
                slab.add_final(row, column, final, source_row=0)
            else:
                kept[row, column - steps] = final
        self._final = kept
        self.position -= lengths
        if (lengths < steps).any():
            slab.pad(lengths, self._after)
