"""Where frames wait for their rollout whose rows are not at the same step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcollect.rollout.layout import FAULTED, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class RaggedBuffer:
    """Frames of rows that are not at the same step: up to 2T of each row."""

    def __init__(self, layout: Layout, num_steps: int) -> None:
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self._frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps) for leaf in layout.per_frame
        }
        self._after: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.carried}
        self._final: dict[tuple[int, int], Arrays] = {}
        # What followed a frame whose successor found no room, by the place that it would have had.
        self._cut_off: dict[tuple[int, int], Arrays] = {}

    def drop(self) -> int:
        """Forget all frames; how many they were."""
        dropped = int(self.position.sum())
        self.position.fill(0)
        self._final.clear()
        self._cut_off.clear()
        return dropped

    def write(
        self,
        real: np.ndarray,
        values: Arrays,
        now: Arrays,
        final: Arrays,
        ended: Sequence[int],
    ) -> list[int]:
        """Append a frame to the rows in ``real``; the rows that had no room for it.

        Args:
            real: bool ``[n]``.
            values: ``[n, *shape]`` of all leaves of the frame.
            now: of the carried leaves, after it.
            final: the same for the rows in ``ended``.
            ended: the rows whose episodes ended with it.
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
            after[rows] = now[key][rows]
        for row in ended:
            if room[row]:
                self._final[row, int(self.position[row])] = {
                    key: array[row].copy()[None] for key, array in final.items()
                }
        self.position[rows] += 1
        return overflow

    def cut_short(self, row: int, traj_id: int, after: Arrays) -> None:
        """End a trajectory with its last frame in ``row``, if that is here and not its end."""
        last = int(self.position[row]) - 1
        if last >= 0 and self._frames[TRAJ_IDS][row, last] == traj_id:
            self._frames["truncated",][row, last] = True
            self._frames[FAULTED][row, last] = True
            self._final[row, last] = {key: array[row].copy()[None] for key, array in after.items()}

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``; what a row lacks is padding."""
        steps = self.num_steps
        lengths = np.minimum(self.position, steps)
        ahead = self.position > steps
        for key, tail in slab.tail.items():
            tail[:] = self._after[key]
            tail[ahead] = self._frames[key][ahead, steps]
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
        kept: dict[tuple[int, int], Arrays] = {}
        for (row, column), final in sorted(self._final.items()):
            if column < steps:
                slab.add_final(row, column, final, source_row=0)
            else:
                kept[row, column - steps] = final
        self._final = kept
        self.position -= lengths
        if (lengths < steps).any():
            slab.pad(lengths, self._after)
