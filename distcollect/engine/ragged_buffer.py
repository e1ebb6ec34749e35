"""A buffer for frames of rows that are not at the same step."""

from __future__ import annotations

import numpy as np

from distcollect.engine.trajectories import Trajectories
from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class StepLog:
    """Which rows the m slots of up to T steps stood for, and what their rows did.

    Attributes:
        rows: int64 ``[T + 1, m]``, the row that each slot showed before a step.
        acting: bool ``[T + 1, m]``: that row took the action of the step, so a frame began.
        real: bool ``[T, m]``: what the step returned in a slot ended a frame, of the row that the
            slot shows before the next step.
    """

    def __init__(self, num_steps: int, num_slots: int) -> None:
        self.rows = np.zeros((num_steps + 1, num_slots), np.int64)
        self.acting = np.zeros((num_steps + 1, num_slots), bool)
        self.real = np.zeros((num_steps, num_slots), bool)


class RaggedBuffer:
    """Up to 2T frames of each of n rows, and what is known of the frame that follows them.

    Attributes:
        num_steps: T.
        frames: ``{key: [n, 2T + 1, *shape]}`` of all leaves. In each row the next frame follows the
            finished ones: at least its state leaves are there.
        position: int64 ``[n]``, how many finished frames each row has.
        pending: bool ``[n]``: the row has taken the action of the next frame.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        """Allocate it for frames of this layout; ``num_steps`` is T."""
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self.pending = np.zeros(layout.num_envs, bool)
        self.frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps + 1) for leaf in layout.per_frame
        }
        self._state = [leaf.key for leaf in layout.state]
        self._at_start = [*(leaf.key for leaf in layout.root), POLICY_VERSION]
        self._at_end = [key for key in self.frames if key not in self._at_start]
        # The state leaves after frames that end a trajectory, or whose successor was dropped: the
        # frames' rows and columns.
        self._finals: list[tuple[np.ndarray, np.ndarray, Arrays]] = []

    def missing(self) -> np.ndarray:
        """Return how many frames each row lacks to have T, int64 ``[n]``."""
        missing: np.ndarray = np.maximum(self.num_steps - self.position, 0)
        return missing

    def last_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have frames, and the trajectory of the last frame of each."""
        rows = np.flatnonzero(self.position)
        return rows, self.frames[TRAJ_IDS][rows, self.position[rows] - 1]

    def drop(self) -> int:
        """Drop the finished frames, and return how many there were."""
        rows, num_dropped = np.arange(len(self.position)), int(self.position.sum())
        for frames in self.frames.values():
            frames[:, 0] = frames[rows, self.position]
        self._finals.clear()
        self.position.fill(0)
        return num_dropped

    def take(self, chunk: Slab, log: StepLog, num_steps: int, trajectories: Trajectories) -> int:
        """Append the frames that end in the first steps of a chunk.

        What has no room is dropped. No trajectory goes on after the gap that this leaves.

        Args:
            chunk: the steps ``[m, T + 1]``; it also has the state leaves after the last step.
            log: what they were.
            num_steps: number of steps.
            trajectories: gives the frames their ids.

        Returns:
            How many frames were dropped.
        """
        room, num_rows = 2 * self.num_steps, len(self.position)
        rows, steps, slots, numbers, num_ended = _entries(
            log.real[:num_steps], log.rows[1:], num_rows
        )
        columns = self.position[rows] + numbers
        fits = columns < room

        begin_rows, begin_steps, begin_slots, begin_numbers, num_begun = _entries(
            log.acting[: num_steps + 1], log.rows, num_rows
        )
        begin_columns = self.position[begin_rows] + self.pending[begin_rows] + begin_numbers
        at_next = log.rows[num_steps, log.acting[num_steps]]  # their next frame has no action yet
        num_begun[at_next] -= 1

        def write_begins(chosen: np.ndarray) -> None:
            at = begin_rows[chosen], np.minimum(begin_columns[chosen], room)
            for key in self._at_start:
                # In order of time: of those that have no room the last one stays.
                self.frames[key][at] = chunk.frames[key][begin_slots[chosen], begin_steps[chosen]]

        write_begins(begin_columns <= room)

        at = rows[fits], columns[fits]
        for key in self._at_end:
            self.frames[key][at] = chunk.frames[key][slots[fits], steps[fits]]
        ended = np.zeros((num_rows, max(1, int(num_ended.max()))), bool)
        ended[rows, numbers] = chunk.ended[slots, steps]
        ids = trajectories.following(ended)
        self.frames[TRAJ_IDS][at] = ids[rows, numbers][fits]

        column_of = np.full(log.real.shape, room)
        column_of[steps, slots] = columns
        final_slots, final_steps, final = chunk.finals()
        final_rows = log.rows[final_steps + 1, final_slots]
        self._add_finals(final_rows, column_of[final_steps, final_slots], final)

        num_dropped = np.bincount(rows[~fits], minlength=num_rows)
        if (overflow := num_dropped.nonzero()[0]).size:
            known = {int(row) for rows, at, _ in self._finals for row in rows[at == room - 1]}
            cut = np.array([row for row in overflow.tolist() if row not in known], np.int64)
            after = {key: self.frames[key][cut, room] for key in self._state}
            self._add_finals(cut, np.full(len(cut), room - 1), after)
            trajectories.cut_before(overflow, ids[overflow, num_ended[overflow] - 1])
            write_begins(begin_columns > room)
        self.position = np.minimum(self.position + num_ended, room)
        self.pending = self.pending + num_begun > num_ended
        return int(num_dropped.sum())

    def _add_finals(self, rows: np.ndarray, columns: np.ndarray, final: Arrays) -> None:
        """Keep the state leaves ``[m, *shape]`` after m frames, of those that have room."""
        kept = columns < 2 * self.num_steps
        self._finals.append((rows[kept], columns[kept], {k: x[kept] for k, x in final.items()}))

    def cut_short(self, trajectories: Trajectories) -> None:
        """All envs start over: mark the last frames truncated and faulted, if nothing ended there.

        The frames that have begun are dropped.
        """
        rows, last_ids = self.last_ids()
        rows = rows[last_ids == trajectories.ids[rows]]
        last = self.position[rows] - 1
        self.frames["truncated",][rows, last] = True
        self.frames[FAULTED][rows, last] = True
        after = {key: self.frames[key][rows, last + 1] for key in self._state}
        self._add_finals(rows, last, after)
        self.pending.fill(False)

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``; where a row has fewer, add padding."""
        steps = self.num_steps
        lengths = np.minimum(self.position, steps)
        for key, tail in slab.tail.items():
            tail[:] = self.frames[key][np.arange(len(lengths)), lengths]
        finals, self._finals = self._finals, []
        for rows, columns, final in finals:
            now = columns < steps
            slab.add_finals(rows[now], columns[now], {key: x[now] for key, x in final.items()})
            later = {key: x[~now] for key, x in final.items()}
            self._add_finals(rows[~now], columns[~now] - steps, later)
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


def _entries(mask: np.ndarray, rows_at: np.ndarray, num_rows: int) -> tuple[np.ndarray, ...]:
    """Find where ``mask`` is True, one row after the other, and in each in order of time.

    Args:
        mask: bool ``[k, m]``.
        rows_at: int64 ``[k or more, m]``, the row of each slot.
        num_rows: number of rows.

    Returns:
        int64 ``[number of entries]``: the row, step and slot of each, and its number in its row.
        Then int64 ``[num_rows]``: how many entries each row has.
    """
    if mask.shape[1] == num_rows:  # each slot stands for the same row all the time
        slots, steps = mask.T.nonzero()
        rows = slots
    else:
        steps, slots = mask.nonzero()
        order = rows_at[steps, slots].argsort(kind="stable")
        steps, slots = steps[order], slots[order]
        rows = rows_at[steps, slots]
    counts = np.bincount(rows, minlength=num_rows)
    numbers = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    return rows, steps, slots, numbers, counts
