"""The trajectories of n envs: their ids, and which of them are the rest of an episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class Trajectories:
    """The trajectory that each of n envs is in.

    Attributes:
        ids: int64 ``[n]``.
    """

    def __init__(self, num_envs: int, new_ids: Iterator[int]) -> None:
        """Begin a trajectory in each env, with an id of ``new_ids``."""
        self.ids = np.zeros(num_envs, np.int64)
        self._rests: set[int] = set()
        self.use_ids(new_ids)

    def use_ids(self, new_ids: Iterator[int]) -> None:
        """Take ids from ``new_ids`` from now on, for the trajectories under way as well."""
        self._new_ids = new_ids
        self.begin(range(len(self.ids)))

    def begin(self, rows: Sequence[int] | np.ndarray) -> None:
        """Begin a new trajectory in each of these rows."""
        self.ids[rows] = np.fromiter(self._new_ids, np.int64, len(rows))

    def following(self, ended: np.ndarray) -> np.ndarray:
        """Go on by T frames, and return the ids of these, int64 ``[n, T]``.

        Args:
            ended: bool ``[n, T]``: a trajectory ends with this frame.
        """
        num_before = ended.cumsum(1)
        num_new = num_before[:, -1].copy()
        num_before -= ended
        # The ids of each row, one after the other: that of the trajectory under way comes first.
        first = (num_new + 1).cumsum() - (num_new + 1)
        ids = np.empty(int(num_new.sum()) + len(first), np.int64)
        is_new = np.ones(len(ids), bool)
        is_new[first] = False
        ids[first] = self.ids
        ids[is_new] = np.fromiter(self._new_ids, np.int64, len(ids) - len(first))
        self.ids[:] = ids[first + num_new]
        of_frames: np.ndarray = ids[first[:, None] + num_before]
        return of_frames

    def cut_before(self, rows: np.ndarray, last_ids: np.ndarray) -> None:
        """Frames of ``rows`` were dropped: what follows of their episodes are new trajectories.

        Args:
            rows: int64 ``[m]``.
            last_ids: int64 ``[m]``, the trajectory of the last frame that was dropped in each row.
                Where another one has begun since, it begins with an episode, and stays as it is.
        """
        rows = rows[self.ids[rows] == last_ids]
        self.begin(rows)
        self._rests.update(self.ids[rows].tolist())

    def rests_in(self, traj_ids: np.ndarray) -> tuple[int, ...]:
        """Those of the next rollout's ``traj_ids`` ``[n, T]`` that are the rest of an episode."""
        if not self._rests:
            return ()
        present = self._rests.intersection(np.unique(traj_ids).tolist())
        oldest = int(traj_ids[:, -1].min())  # a row's ids only rise
        self._rests = {traj_id for traj_id in self._rests if traj_id >= oldest}
        return tuple(present)
