"""Where rollouts are missing between those that the user gets, no trajectory goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict

from distcollect.common.peer_ids import identity
from distcollect.rollout.header import Header
from distcollect.rollout.layout import TRAJ_IDS


class _Last(NamedTuple):
    """What is known of a worker after its last rollout.

    Attributes:
        next: incarnation and sequence of the rollout that follows.
        rows: those that have had no frame since a gap.
        new_ids: the ids of trajectories that were cut by a gap, by those that their worker uses.
    """

    next: tuple[int, int] | None = None
    rows: frozenset[int] = frozenset()
    new_ids: dict[int, int] = {}  # noqa: RUF012 - never changed


class Gaps:
    """Gives the rest of a trajectory a new id where a rollout before it was not delivered."""

    def __init__(self) -> None:
        """Start without rollouts."""
        self._workers: dict[int, _Last] = {}  # by worker_id
        self._taken: dict[int, _Last] = {}  # the same, once the batch is delivered
        self._own_ids: Iterator[int] | None = None

    def take(self, frames: TensorDict, headers: Sequence[Header], num_envs: int) -> set[int]:
        """Write new ids to the next batch, and return those of trajectories without a beginning.

        Args:
            frames: of W rollouts, ordered as ``[W, n, T]``.
            headers: of the rollouts.
            num_envs: n.
        """
        self._taken = {}
        rests = {traj_id for header in headers for traj_id in header.work.rests}
        for index, header in enumerate(headers):
            worker_id, incarnation, sequence = header[:3]
            known = self._taken if worker_id in self._taken else self._workers
            following, rows, new_ids = known.get(worker_id, _Last())
            if header.work.was_reset or not sequence:
                rows, new_ids = frozenset(), {}
            elif following != (incarnation, sequence):
                rows = frozenset(range(num_envs))
            if rows or new_ids:
                whole = {*header.work.begun}.difference(header.work.rests)
                ids = frames[TRAJ_IDS]
                of_rollouts = ids.reshape(len(headers), num_envs, -1)
                rows, new_ids = self._cut(of_rollouts[index], rows, new_ids, whole)
                rests.update(new_ids.values())
                frames[TRAJ_IDS] = of_rollouts.reshape(ids.shape)
            self._taken[worker_id] = _Last((incarnation, sequence + 1), rows, new_ids)
        return rests

    def _cut(
        self, ids: torch.Tensor, rows: frozenset[int], new_ids: dict[int, int], whole: set[int]
    ) -> tuple[frozenset[int], dict[int, int]]:
        """Write new ids to a rollout's ``[n, T]``; what :class:`_Last` has after it.

        ``whole``: trajectories whose first frame is that of a row; nothing of them is missing.
        """
        first = ids[:, 0].tolist()
        if -1 not in first:  # else it was preempted before each row had a frame
            new_ids = {old: new for old, new in new_ids.items() if old in first}
        own_ids = self._own_ids = self._own_ids or identity().own_traj_ids()
        present = [row for row in rows if first[row] >= 0]
        cut = [first[row] for row in present if first[row] not in whole]
        new_ids = {**new_ids, **{old: next(own_ids) for old in cut}}
        for old, new in new_ids.items():
            ids[ids == old] = new
        return rows.difference(present), new_ids

    def delivered(self) -> None:
        """The user has the batch that was taken last."""
        self._workers.update(self._taken)

    def free_ids(self) -> None:
        """Let others use the same ids."""
        if self._own_ids is not None:
            identity().free_traj_ids(self._own_ids)
            self._own_ids = None
