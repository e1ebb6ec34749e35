"""Gives batches their shape: rollouts joined, or one row for each trajectory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.base import TensorDictBase

from distcollect.collectors.options import CollectorOptions
from distcollect.errors import ArgumentError, ArgumentTypeError, BatchTimeout
from distcollect.results import Frames, LedgerReport
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import FAULTED, MASK, TRAJ_IDS, Layout
from distcollect.rollout.spaces import as_key, indexable


class BatchFormat:
    """Gives batches the form that a collector's options ask for."""

    def __init__(self, options: CollectorOptions) -> None:
        """Read ``options``."""
        self._joins = options.joins
        self._options = options
        self._has_trajectories = bool(options.split_trajs) or options.trajs_per_batch is not None

    def _joins_at_once(self, layout: Layout) -> bool:
        """Return True if rollouts are assembled as they are joined."""
        is_changed = self._has_trajectories or self._options.set_truncated or layout.is_loose
        return self._joins == 0 and not is_changed

    def shape(self, layout: Layout, rollouts: Sequence[Rollout]) -> tuple[int, ...] | None:
        """The shape in which a batch is assembled from W rollouts; None: as a loose layout has it.

        It is ``[W, *dims, T]``, with the dimensions of a rollout's rows, or what the user gets.
        """
        if layout.is_loose:
            return None
        num_rollouts, num_steps = len(rollouts), rollouts[0].header.num_steps
        dims = layout.row_dims(squeeze=self._options.squeeze)
        if not self._joins_at_once(layout):
            return (num_rollouts, *dims, num_steps)
        # Each operation on a TensorDict takes long.
        first, *others = *dims, num_steps
        return (num_rollouts * first, *others)

    def shaped(self, rows: TensorDict, layout: Layout) -> TensorDict:
        """A batch made of rollouts, in its shape; with trajectories, ``[W, *dims, T]``.

        Args:
            rows: the rollouts of W workers, in the shape that :meth:`shape` says; for a loose
                layout ``[W, *batch_size, T]``.
            layout: the layout of each rollout.
        """
        if self._options.set_truncated:
            _truncate_last(rows, even_terminated=layout.is_torchrl)
        if self._has_trajectories or self._joins_at_once(layout):
            return rows
        if layout.is_loose and rows.ndim == 2 and not self._options.squeeze:
            rows = rows.unsqueeze(1)
        if self._joins == "stack":
            return rows
        parts = list(rows.unbind(0))
        batch: TensorDict = (
            parts[0] if len(parts) == 1 else torch.cat(parts, -1 if self._joins == -1 else 0)
        )
        if self._joins == -1:
            batch = _without_padding(batch)
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        return batch

    def rollouts(self, batch: TensorDict, num_rollouts: int) -> list[TensorDict]:
        """The rollouts ``[n, T]`` in a batch, or ``[T]`` of single envs.

        Args:
            batch: as :meth:`shaped` returned it.
            num_rollouts: number of rollouts in the batch.
        """
        if num_rollouts == 1:
            return [batch]
        if self._joins == "stack" and batch.ndim > 1:  # which postproc may have changed
            return list(batch.unbind(0))
        return list(batch.chunk(num_rollouts, -1 if self._joins == -1 else 0))

    def processed(self, batch: TensorDict) -> TensorDict:
        """The batch as it is delivered: with ``split_trajs`` and ``postproc`` applied.

        For a replay buffer without what the mask leaves out, ``[F]``, if there is a mask.

        Raises:
            ArgumentTypeError: ``postproc`` returned no TensorDict. Its own errors pass through.
        """
        options = self._options
        if options.split_trajs:
            batch = split(batch)
        if options.track_policy_version:
            for key in ("policy_version", ("next", "policy_version")):
                batch[key] = batch["collector", "policy_version"].clone()
        mask = batch.get(MASK, None)
        if not options.track_traj_ids:
            del batch["collector"]
            if mask is not None:
                batch[MASK] = mask
        if options.postproc is not None:
            batch = options.postproc(batch)
            if not isinstance(batch, TensorDictBase):
                raise ArgumentTypeError(
                    f"postproc returned {type(batch).__name__}: it must return a TensorDict"
                )
            mask = batch.get(MASK, mask)  # it may have selected other entries
        if options.replay_buffer is None or mask is None:
            return batch
        if batch.shape.numel() != mask.numel():
            return batch  # of what postproc has chosen itself
        return batch.reshape(-1)[mask.reshape(-1)]


@dataclass
class _Unfinished:
    """The trajectories of one worker that have not ended.

    Attributes:
        parts: the parts of each, by traj_id.
        incomplete: traj_ids whose beginning or end is missing.
    """

    parts: dict[int, list[TensorDict]] = field(default_factory=dict)
    incomplete: set[int] = field(default_factory=set)


class WholeTrajectories:
    """Joins the parts of trajectories that span several rollouts; orders them by their end.

    Attributes:
        abandoned: worker_id to the number of frames of trajectories that will never be delivered:
            their env or worker failed, a rollout in between was dropped, or it ended, or was reset,
            before.
        held: the same of those that may be.
    """

    def __init__(self, options: CollectorOptions) -> None:
        """Start without trajectories; a replay buffer gets as many at a time as there are."""
        self.abandoned, self.held = Counter[int](), Counter[int]()
        self._options = options
        has_buffer = options.replay_buffer is not None
        self._num_per_batch = None if has_buffer else options.trajs_per_batch
        self._workers: dict[int, _Unfinished] = {}  # by worker_id
        self._whole: list[tuple[int, list[TensorDict]]] = []  # worker_id and parts of each

    @property
    def num_whole(self) -> int:
        """Number of whole trajectories."""
        return len(self._whole)

    @property
    def ready(self) -> bool:
        """True if there are enough whole trajectories for a batch."""
        return self.num_whole >= (self._num_per_batch or 1)

    def too_few(self, limit_s: float) -> BatchTimeout:
        """The error for a batch that did not come within ``limit_s`` seconds."""
        hint = "give next() a longer timeout_s"
        if self._options.reset_at_each_iter:
            hint = (
                "with reset_at_each_iter only episodes that fit into a rollout are whole: leave it "
                "out, or increase frames_per_batch"
            )
        return BatchTimeout(
            f"trajs_per_batch={self._num_per_batch or 1}, but the number of whole trajectories "
            f"within {limit_s:g} s was {self.num_whole}; {hint}"
        )

    def add(self, rows: TensorDict, headers: Sequence[Header], rests: set[int]) -> None:
        """Add the trajectories in W rollouts.

        Args:
            rows: ``[W, *dims, T]``, with the dimensions of a rollout's rows.
            headers: of the rollouts.
            rests: ids of trajectories whose beginning is missing.
        """
        for header, rollout in zip(headers, rows.unbind(0), strict=True):
            self._add(rollout, header.worker_id, rests)

    def _add(self, rows: TensorDict, worker_id: int, rests: set[int]) -> None:
        worker = self._workers.setdefault(worker_id, _Unfinished())
        worker.incomplete.update(rests)
        unfinished: set[int] = set()
        frames, lengths = _by_trajectory(rows)
        self.held[worker_id] += len(frames)
        done_keys = _flags(frames["next"], "done")
        if ("done",) in done_keys:
            done_keys = [("done",)]  # an agent may be done long before its env
        for part in frames.split(lengths.tolist()):
            traj_id = int(part[TRAJ_IDS][0])
            ends = any(bool(part["next"][key][-1].any()) for key in done_keys)
            if not ends:
                unfinished.add(traj_id)
            if ends and bool(part[FAULTED][-1]):
                worker.incomplete.add(traj_id)  # its end is missing
            if traj_id in worker.incomplete:
                self._drop(worker_id, [part])
            elif ends:
                self._whole.append((worker_id, [*worker.parts.pop(traj_id, ()), part]))
            else:
                # A copy: a view would keep the whole rollout in memory until the trajectory ends.
                worker.parts.setdefault(traj_id, []).append(part.clone())
        if (rows[TRAJ_IDS][..., 0] < 0).any():
            return  # the rollout was preempted before every env had a frame
        # Every env's present trajectory is known now, so no other one of this worker will ever end.
        worker.incomplete &= unfinished
        for traj_id in worker.parts.keys() - (unfinished - worker.incomplete):
            self._drop(worker_id, worker.parts.pop(traj_id))

    def _drop(self, worker_id: int, parts: Sequence[TensorDict]) -> None:
        count = sum(map(len, parts))
        self.held[worker_id] -= count
        self.abandoned[worker_id] += count

    def abandon(self) -> None:
        """Drop all trajectories, whole or not; the next ones must begin with a reset."""
        self.abandoned.update(self.held)
        self.held.clear()
        self._whole = []
        for worker in self._workers.values():
            worker.parts = {}

    def first(self) -> TensorDict:
        """The next batch ``[trajectories, longest]``, or without padding ``[F]``.

        There must be enough whole trajectories: see :attr:`ready`.
        """
        first = self._whole[: self._num_per_batch]
        frames: TensorDict = torch.cat([part for _, parts in first for part in parts])
        if self._options.traj_format == "cat":
            frames.names = ["time"]
            return frames
        return _padded(frames, torch.tensor([sum(map(len, parts)) for _, parts in first]))

    def drop_first(self) -> None:
        """Drop the trajectories that :meth:`first` returns."""
        for worker_id, parts in self._whole[: self._num_per_batch]:
            self.held[worker_id] -= sum(map(len, parts))
        del self._whole[: self._num_per_batch]

    def settled(self, report: LedgerReport) -> LedgerReport:
        """``report`` without the frames that it takes for delivered and nobody has."""

        def corrected(frames: Frames, held: int, abandoned: int) -> Frames:
            return replace(
                frames,
                delivered=frames.delivered - held - abandoned,
                lost={**frames.lost, **({"unfinished": abandoned} if abandoned else {})},
                open=frames.open + held,
            )

        workers = {
            w: corrected(frames, self.held[w], self.abandoned[w])
            for w, frames in report.workers.items()
        }
        total = corrected(report.total, self.held.total(), self.abandoned.total())
        return LedgerReport(workers, total)


def split(rows: TensorDict) -> TensorDict:
    """One row for each trajectory, or part of one, in ``rows`` ``[..., T]``, in their order.

    A row is padded after its last frame: with zeros, -1 as the trajectory's id, and False in
    ``("collector", "mask")``.
    """
    return _padded(*_by_trajectory(rows))


def _by_trajectory(rows: TensorDict) -> tuple[TensorDict, torch.Tensor]:
    """The frames ``[F]`` of ``rows`` ``[..., T]`` without padding, and each trajectory's length."""
    ids = rows[TRAJ_IDS]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    is_real = ids >= 0
    frames = rows.reshape(-1)
    if not is_real.all():
        frames = frames[is_real.reshape(-1)]
    first = begins[is_real].nonzero().flatten()
    bounds = torch.cat([first, first.new_tensor([len(frames)])])
    return frames, bounds.diff()


def _padded(frames: TensorDict, lengths: torch.Tensor) -> TensorDict:
    """``frames`` as rows of these lengths, padded to the longest."""
    lengths = lengths.to(frames[TRAJ_IDS].device).unsqueeze(1)
    steps, ends = torch.arange(int(lengths.max()), device=lengths.device), lengths.cumsum(0)
    is_real = steps < lengths
    # What is no tensor, and the shapes of a loose layout, are padded by those of the last frame.
    batch: TensorDict = frames[torch.minimum(ends - lengths + steps, ends - 1)]
    if isinstance(batch, LazyStackedTensorDict):
        batch = batch.clone()  # the same frame stands in several places
        batch[~is_real].zero_()
    else:
        for value in batch.values(include_nested=True, leaves_only=True):
            indexable(value)[~is_real] = 0
    batch[TRAJ_IDS] = batch[TRAJ_IDS].masked_fill(~is_real, -1)
    batch.names = [None, "time"]
    if MASK not in frames.keys(include_nested=True):
        batch[MASK] = is_real
    return batch


def _without_padding(batch: TensorDict) -> TensorDict:
    """``batch`` without the steps that are padding in all of its rows."""
    is_real = batch[TRAJ_IDS] >= 0
    if is_real.all():
        return batch
    return batch[..., is_real.reshape(-1, is_real.shape[-1]).any(0)]


def _truncate_last(rows: TensorDict, *, even_terminated: bool) -> None:
    """Mark the last frame of each row truncated and done.

    Args:
        rows: ``[..., T]``; changed in place.
        even_terminated: also where the episode terminated there, as TorchRL has it.
    """
    step = rows["next"]
    is_real = rows[TRAJ_IDS] >= 0
    last = is_real.sum(-1) - 1
    any_real = last >= 0
    at = (*any_real.nonzero(as_tuple=True), last[any_real])
    parents = [key[:-1] for key in _flags(step, "truncated")]
    if not parents:
        raise ArgumentError(
            "set_truncated: the env has no entry 'truncated'; its method add_truncated_keys() adds "
            "one"
        )
    for parent in parents:
        flags = step if not parent else step[parent]
        terminated = flags.get("terminated", None)
        marks_all = even_terminated or terminated is None
        truncated, done = flags["truncated"], flags["done"]
        truncated[at] |= True if marks_all else ~terminated[at]
        done[at] = True
        # A stack that is made when an entry is read gave copies.
        flags["truncated"], flags["done"] = truncated, done


def _flags(step: TensorDict, name: str) -> list[tuple[str, ...]]:
    """The keys of all flags of this name, of the whole env or of parts of it."""
    keys = step.keys(include_nested=True, leaves_only=True)
    return [key for key in map(as_key, keys) if key[-1] == name]
