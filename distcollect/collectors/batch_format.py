"""The shape in which batches are handed on: joined, split by trajectory, compacted, processed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from distcollect.common import checks
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.rollout.header import Header
from distcollect.rollout.layout import MASK, TRAJ_IDS, Layout

PostProcess = Callable[[TensorDict], Any]


@dataclass(frozen=True)
class BatchFormat:
    """How a batch looks.

    Attributes:
        cat_results: how the rollouts of a sync batch are joined: 0 along their first dimension,
            -1 along time, "stack" along a new first one.
        squeeze: rollouts of a single env have no row dimension.
        set_truncated: mark the last frame of each row truncated, unless its episode ended there.
        compact_obs: the observations under "next" are left out, by whoever makes the batch.
        split_trajs: one row for each trajectory, padded.
        trajs_per_batch: hand on so many whole trajectories at a time; None: whatever was collected.
        postproc: called with the batch; what it returns is handed on.
    """

    cat_results: int | str | None = 0
    squeeze: bool = False
    set_truncated: bool = False
    compact_obs: bool = False
    split_trajs: bool = False
    trajs_per_batch: int | None = None
    postproc: PostProcess | None = None

    def __post_init__(self) -> None:
        if self.cat_results not in (0, -1, "stack") or isinstance(self.cat_results, bool):
            raise ArgumentError(f"cat_results={self.cat_results!r}: use 0, -1 or 'stack'")
        if self.postproc is not None and not callable(self.postproc):
            raise ArgumentTypeError(
                f"postproc={self.postproc!r}: must be a callable that takes a batch and returns one"
            )
        checks.positive("trajs_per_batch", self.trajs_per_batch, optional=True)
        if self.trajs_per_batch is not None and self.set_truncated:
            raise ArgumentError(
                "set_truncated ends trajectories at the end of each row, and trajs_per_batch asks "
                "for whole ones: drop one of them"
            )
        if self.trajs_per_batch is not None and self.split_trajs:
            raise ArgumentError(
                "split_trajs and trajs_per_batch are both given: the latter gives one row for each "
                "trajectory already"
            )

    def shaped(self, rows: TensorDict, layout: Layout) -> TensorDict:
        """The batch from its rows.

        Args:
            rows: ``[W * n, T]``, the rollouts of W workers one after the other.
            layout: of each rollout.
        """
        if self.set_truncated:
            _truncate_last(rows)
        if self.split_trajs or self.trajs_per_batch is not None:
            return rows
        num_envs = layout.num_envs
        num_rollouts = rows.shape[0] // num_envs
        single = self.squeeze and num_envs == 1
        if self.cat_results == "stack":
            stacked = rows.unflatten(0, (num_rollouts, num_envs))
            return stacked.squeeze(1) if single else stacked
        if self.cat_results == -1:
            by_env = rows.unflatten(0, (num_rollouts, num_envs)).transpose(0, 1).flatten(1, 2)
            by_env.names = [None, "time"]
            return by_env.squeeze(0) if single else by_env
        if single:
            flat = rows.flatten(0, 1)
            flat.names = ["time"]
            return flat
        return rows

    def processed(self, batch: TensorDict) -> TensorDict:
        """What ``postproc`` makes of a batch.

        Raises:
            Whatever it raises, and ArgumentTypeError if it returns no TensorDict.
        """
        if self.split_trajs:
            batch = split(batch)
        if self.postproc is None:
            return batch
        result = self.postproc(batch)
        if not isinstance(result, TensorDictBase):
            raise ArgumentTypeError(
                f"postproc returned {type(result).__name__}: it must return a TensorDict"
            )
        return result


class WholeTrajectories:
    """Puts trajectories together that span several batches, in the order in which they end.

    Attributes:
        abandoned_frames: frames of trajectories that will never be whole: their env or worker
            failed, or a rollout in between was given up.
    """

    def __init__(self, num_per_batch: int) -> None:
        self.abandoned_frames = 0
        self._num_per_batch = num_per_batch
        self._begun: dict[int, dict[int, list[TensorDict]]] = {}  # by worker_id and traj_id
        self._spoiled: dict[int, set[int]] = {}  # traj_ids whose beginning is missing
        self._newest: dict[int, tuple[int, int]] = {}  # rollout of each worker
        self._whole: deque[list[TensorDict]] = deque()

    @property
    def ready(self) -> bool:
        """Whether there are enough for a batch."""
        return len(self._whole) >= self._num_per_batch

    def add(self, rows: TensorDict, headers: Sequence[Header]) -> None:
        """Take the parts of trajectories in ``rows``, ``[W * n, T]``, of these W rollouts."""
        num_envs = len(rows) // len(headers)
        for index, header in enumerate(headers):
            self._add(rows[index * num_envs : (index + 1) * num_envs], header)

    def _add(self, rows: TensorDict, header: Header) -> None:
        begun = self._begun.setdefault(header.worker_id, {})
        spoiled = self._spoiled.setdefault(header.worker_id, set())
        incarnation, sequence = self._newest.get(header.worker_id, (header.incarnation, -1))
        follows = (header.incarnation, header.sequence) == (incarnation, sequence + 1)
        if not follows and header.sequence:
            spoiled |= set(rows[TRAJ_IDS][:, 0].tolist())
        self._newest[header.worker_id] = (header.incarnation, header.sequence)
        going_on: set[int] = set()
        frames, lengths = _by_trajectory(rows)
        for part in frames.split(lengths.tolist()):
            traj_id = int(part[TRAJ_IDS][0])
            ends = bool(part["next", "done"][-1])
            if not ends:
                going_on.add(traj_id)
            if traj_id in spoiled:
                self.abandoned_frames += len(part)
            elif ends:
                self._whole.append([*begun.pop(traj_id, ()), part])
            else:
                # A copy, lest it keeps all others of this batch in memory until it ends.
                begun.setdefault(traj_id, []).append(part.clone())
        if (rows[TRAJ_IDS][:, 0] < 0).any():
            return  # preempted before every row had a frame
        # All envs have shown what they are in, so nothing else of this worker will ever end.
        spoiled &= going_on
        for traj_id in begun.keys() - (going_on - spoiled):
            self.abandoned_frames += sum(len(part) for part in begun.pop(traj_id))

    def take(self) -> TensorDict | None:
        """The next batch, ``[trajs_per_batch, T]``, T the longest of them; or the few there are."""
        count = min(len(self._whole), self._num_per_batch)
        if not count:
            return None
        taken = [self._whole.popleft() for _ in range(count)]
        lengths = torch.tensor([sum(len(part) for part in parts) for parts in taken])
        frames = torch.cat([part for parts in taken for part in parts])
        return _padded(frames, lengths)


def split(rows: TensorDict) -> TensorDict:
    """One row for each trajectory, or part of one, in ``rows`` ``[n, T]``, in their order.

    What follows its last frame is zero, with -1 for the trajectory's id, and False in
    ``("collector", "mask")``.
    """
    return _padded(*_by_trajectory(rows))


def _by_trajectory(rows: TensorDict) -> tuple[TensorDict, torch.Tensor]:
    """The frames of ``rows`` ``[n, T]`` one after the other, without padding; how many each has."""
    ids = rows[TRAJ_IDS]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    is_real = ids >= 0
    frames = rows.reshape(-1)
    if not is_real.all():
        frames = frames[is_real.reshape(-1)]
    first = begins[is_real].nonzero().flatten()
    bounds = torch.cat([first, first.new_tensor([len(frames)])])
    return frames, bounds.diff()


def _padded(frames: TensorDict, lengths: torch.Tensor) -> TensorDict:
    """Rows of these lengths, ``[len(lengths), longest]``."""
    lengths = lengths.to(frames[TRAJ_IDS].device)
    is_real = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]

    def spread(key: Any, value: torch.Tensor) -> torch.Tensor:
        out = value.new_full((*is_real.shape, *value.shape[1:]), -1 if key == TRAJ_IDS else 0)
        out[is_real] = value
        return out

    batch: TensorDict = frames.named_apply(spread, nested_keys=True, batch_size=is_real.shape)
    batch.names = [None, "time"]
    batch[MASK] = batch[MASK] if MASK in frames.keys(include_nested=True) else is_real
    return batch


def _truncate_last(rows: TensorDict) -> None:
    following = rows["next"]
    is_real = rows[TRAJ_IDS] >= 0
    last = is_real.sum(-1) - 1
    any_real = last >= 0
    at = (any_real.nonzero().flatten(), last[any_real])
    following["truncated"][at] |= ~following["terminated"][at]
    following["done"][at] = True
