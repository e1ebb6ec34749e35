"""Where frames are missing between those that the user gets, no trajectory goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from distcollect.common.peer_ids import identity
from distcollect.rollout.header import Header
from distcollect.rollout.layout import MASK, TRAJ_IDS


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
    """Gives the rest of a trajectory a new id where frames before it were not delivered."""

    def __init__(self, *, takes_masked: bool) -> None:
        """Start without rollouts; ``takes_masked``: the user gets masked frames too."""
        self._takes_masked = takes_masked
        self._workers: dict[Any, _Last] = {}  # by trainer and worker_id
        self._taken: dict[Any, _Last] = {}  # the same, once the batch is delivered
        self._own_ids: Iterator[int] | None = None

    def take(
        self, frames: TensorDict, headers: Sequence[Header], num_envs: int, trainer: Any = None
    ) -> set[int]:
        """Write new ids to the next batch, and return those of trajectories without a beginning.

        Args:
            frames: of W rollouts, ordered as ``[W, n, T]``.
            headers: of the rollouts.
            num_envs: n.
            trainer: whose workers they are; None: this one's.
        """
        self._taken = {}
        rests = {traj_id for header in headers for traj_id in header.work.rests}
        mask = None if self._takes_masked else frames.get(MASK, None)
        for index, header in enumerate(headers):
            worker_id, incarnation, sequence = header[:3]
            worker = trainer, worker_id
            known = self._taken if worker in self._taken else self._workers
            following, rows, new_ids = known.get(worker, _Last())
            if header.work.was_reset or not sequence:
                rows, new_ids = frozenset(), {}
            elif following != (incarnation, sequence):
                rows = frozenset(range(num_envs))
            if rows or new_ids or mask is not None:
                whole = {*header.work.begun}.difference(header.work.rests)
                ids = frames[TRAJ_IDS]
                of_rollouts = ids.reshape(len(headers), num_envs, -1)
                own = first = of_rollouts[index]
                if mask is not None:
                    # Versions only grow, so those that are too old are at a row's beginning.
                    counts = mask.reshape(of_rollouts.shape)[index]
                    at = counts.int().argmax(1, keepdim=True)
                    first = own.where(counts, -1).gather(1, at)
                    begins = own.gather(1, (at - 1).clamp(0)) != first
                    masked = (own >= 0) & ~counts
                    rows |= {*masked[:, 0].nonzero().flatten().tolist()}
                    whole |= {*first[begins].tolist()}.difference(header.work.rests)
                    whole -= {*own[masked].tolist()}
                rows, new_ids = self._cut(own, first[:, 0].tolist(), rows, new_ids, whole)
                rests.update(new_ids.values())
                frames[TRAJ_IDS] = of_rollouts.reshape(ids.shape)
            self._taken[worker] = _Last((incarnation, sequence + 1), rows, new_ids)
        return rests

    def _cut(
        self,
        ids: torch.Tensor,
        first: list[int],
        rows: frozenset[int],
        new_ids: dict[int, int],
        whole: set[int],
    ) -> tuple[frozenset[int], dict[int, int]]:
        """Write new ids to a rollout's ``[n, T]``; what :class:`_Last` has after it.

        ``first``: of each row the id of the first frame that counts; -1: none does. ``whole``:
        trajectories whose first frame is that of a row; nothing of them is missing.
        """
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
