"""The data contract: how frames lie in a worker's memory, on the wire, and in a batch.

A worker writes frames into a :class:`Slab`, whose tensors are what travels: each observation once.
:func:`assemble` turns the tensors of one or more rollouts into the batch that the user gets, with
TorchRL's keys, rebuilding what follows from the rest (``next`` observations, ``done``, ids).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from . import recycler
from .shared import SharedTensor, allocate
from .spaces import Arrays, Key, Leaf, nested
from .stats import NO_WORK, Work
from .trace import Span

Tensors = list[torch.Tensor]

TRAJ_IDS: Key = ("collector", "traj_ids")
POLICY_VERSION: Key = ("collector", "policy_version")
FAULTED: Key = ("collector", "faulted")
MASK: Key = ("collector", "mask")
_BOOKKEEPING = (
    Leaf(("reward",), (), torch.float32),
    Leaf(("terminated",), (), torch.bool),
    Leaf(("truncated",), (), torch.bool),
    Leaf(TRAJ_IDS, (), torch.int64),
    Leaf(POLICY_VERSION, (), torch.int64),
    Leaf(FAULTED, (), torch.bool),
)


@dataclass(frozen=True)
class Layout:
    """What a frame of one worker consists of; with a number of steps it fixes every shape.

    Attributes:
        num_envs: n, the rows of a rollout.
        carried: leaves that a frame has at its start and at its end: observations, info entries.
        action: leaves of the action.
        extras: what else the policy writes, e.g. log-probabilities.
        outcomes: leaves that a frame has at its end only, beside the reward.
    """

    num_envs: int
    carried: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    extras: tuple[Leaf, ...]
    outcomes: tuple[Leaf, ...] = ()

    @property
    def per_frame(self) -> tuple[Leaf, ...]:
        """Leaves of shape ``[n, T, *shape]``, in the order in which they travel."""
        return (*self.carried, *self.action, *self.extras, *self.outcomes, *_BOOKKEEPING)


# A leaf that is smaller than this in a rollout travels in one tensor with its like: a tensor of its
# own costs some 0.1 ms on the wire, but large ones are copied side by side.
_PACKED_BELOW_BYTES = 256 * 1024
_ALIGNMENT = 16


class _Wire:
    """How a rollout of T steps lies in the tensors that travel.

    The first holds all small leaves, and then the final observations; each large leaf has one of
    its own. Where the receiver maps the sender's memory no leaf is sent, so none is small. A leaf
    stands here once for all frames, ``[n, T, *shape]``, and if it is a carried one again for what
    follows the last, ``[n, *shape]``.
    """

    def __init__(self, layout: Layout, num_steps: int, *, mapped: bool) -> None:
        n = layout.num_envs
        leaves = [(leaf, (n, num_steps, *leaf.shape)) for leaf in layout.per_frame]
        leaves += [(leaf, (n, *leaf.shape)) for leaf in layout.carried]
        self._shapes = [(shape, leaf.dtype) for leaf, shape in leaves]
        self._sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes]
        self._is_small = [not mapped and size < _PACKED_BELOW_BYTES for size in self._sizes]
        self._mapped = mapped
        self._carried = layout.carried
        self.packed_bytes = sum(
            _aligned(size) for size, small in zip(self._sizes, self._is_small, strict=True) if small
        )

    def allocate(self) -> tuple[Tensors, list[SharedTensor]]:
        """New memory: the tensors that travel, and if it is mapped what travels in their place."""
        large = [
            (shape, dtype, size)
            for (shape, dtype), size, small in zip(
                self._shapes, self._sizes, self._is_small, strict=True
            )
            if not small
        ]
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8)
        if not self._mapped:
            return [packed, *(recycler.empty(shape, dtype) for shape, dtype, _ in large)], []
        memory, segment = allocate(sum(_aligned(size) for _, _, size in large))
        stand_ins: list[SharedTensor] = []
        offset = 0
        for shape, dtype, size in large:
            stand_ins.append(SharedTensor(segment, offset, shape, dtype))
            offset += _aligned(size)
        return [packed, *(stand_in.within(memory) for stand_in in stand_ins)], stand_ins

    def leaves(self, wire: Tensors) -> Tensors:
        """One tensor for each leaf, sharing the memory of ``wire``."""
        packed, *large = wire
        leaves: Tensors = []
        start = 0
        for (shape, dtype), size, small in zip(
            self._shapes, self._sizes, self._is_small, strict=True
        ):
            if small:
                leaves.append(_view(packed, start, shape, dtype))
                start += _aligned(size)
            else:
                leaves.append(large.pop(0))
        return leaves

    def with_final(
        self, packed: torch.Tensor, at: list[int], final: Iterable[np.ndarray]
    ) -> torch.Tensor:
        """``packed``; then how many episodes ended, where, and each carried leaf's final values."""
        parts = [packed]
        for array in (np.array([len(at), *at], np.int64), *final):
            flat = torch.from_numpy(array).reshape(-1).view(torch.uint8)
            parts += [flat, flat.new_zeros(_aligned(len(flat)) - len(flat))]
        return torch.cat(parts)

    def final(self, packed: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """What :meth:`with_final` put in: int64 ``[k]``, ``[k, *shape]`` of each carried leaf."""
        start = self.packed_bytes
        if len(packed) == start:
            return torch.empty(0, dtype=torch.int64), [_none_of(leaf) for leaf in self._carried]
        num_ends = int(_view(packed, start, (1,), torch.int64))
        at = _view(packed, start, (1 + num_ends,), torch.int64)
        start += _aligned(at.nbytes)
        values: Tensors = []
        for leaf in self._carried:
            values.append(_view(packed, start, (num_ends, *leaf.shape), leaf.dtype))
            start += _aligned(values[-1].nbytes)
        return at[1:], values


@functools.lru_cache(maxsize=16)
def _wire_of(layout: Layout, num_steps: int, *, mapped: bool) -> _Wire:
    """The wire form, worked out once and not for every batch."""
    return _Wire(layout, num_steps, mapped=mapped)


def _none_of(leaf: Leaf) -> torch.Tensor:
    """A tensor ``[0, *leaf.shape]``."""
    return torch.empty((0, *leaf.shape), dtype=leaf.dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _view(
    flat: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return flat[start : start + size].view(dtype).view(shape)


class Slab:
    """Memory for one rollout ``[n, T]``, written in place by the engine, used again and again.

    The memory is torch's own (the RPC layer would copy memory that numpy owns once more before
    sending it) and is written through numpy views, which cost a fraction per small write.

    Attributes:
        frames: ``{key: [n, T, *shape]}`` of all leaves; the next ones are parts of it.
        root: of the carried leaves, as they are at the start of each frame.
        action: of the action's leaves.
        extras: of what the policy writes beside the action.
        outcomes: of the leaves that only a frame's end has.
        tail: ``{key: [n, *shape]}`` of the carried leaves after the last frame.
        num_frames: how many frames in it are real; the others are padding.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool = False) -> None:
        """Allocate it; ``shared``: such that a trainer on this host can map it."""
        self.layout = layout
        self.num_steps = num_steps
        self.shared = shared
        self._wire = _wire_of(layout, num_steps, mapped=shared)
        self._memory, self._stand_ins = self._wire.allocate()
        arrays = [leaf.numpy() for leaf in self._wire.leaves(self._memory)]
        per_frame = layout.per_frame
        self.frames: Arrays = {
            leaf.key: array for leaf, array in zip(per_frame, arrays, strict=False)
        }
        self.tail: Arrays = {
            leaf.key: array
            for leaf, array in zip(layout.carried, arrays[len(per_frame) :], strict=True)
        }
        self.root: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.carried}
        self.action: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.action}
        self.extras: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.extras}
        self.outcomes: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.outcomes}
        self.reward = self.frames["reward",]
        self.terminated = self.frames["terminated",]
        self.truncated = self.frames["truncated",]
        self.traj_ids = self.frames[TRAJ_IDS]
        self.policy_version = self.frames[POLICY_VERSION]
        self.faulted = self.frames[FAULTED]
        self.num_frames = layout.num_envs * num_steps
        self._final_at: list[int] = []
        self._final_room = layout.num_envs
        self._final: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.carried}

    def clear(self) -> None:
        """Forget what the engine doesn't write in each frame: episode ends, padding."""
        self.num_frames = self.layout.num_envs * self.num_steps
        self.terminated.fill(False)
        self.truncated.fill(False)
        self.faulted.fill(False)
        self._final_at.clear()

    def add_final(
        self, row: int, step: int, final: Arrays, *, source_row: int | None = None
    ) -> None:
        """Keep the true final observation of the episode that ended in ``row`` at ``step``.

        It stands in the same row of ``final``, or in ``source_row``.
        """
        count = len(self._final_at)
        source = row if source_row is None else source_row
        if count == self._final_room:
            self._final_room *= 2
            for key, kept in self._final.items():
                self._final[key] = np.concatenate([kept, np.zeros_like(kept)])
        for key, kept in self._final.items():
            kept[count] = final[key][source]
        self._final_at.append(row * self.num_steps + step)

    def pad(self, lengths: np.ndarray, after: Arrays) -> None:
        """Make padding of all but the first frames of each row.

        That is zeros, with -1 for a trajectory id, and the version of the row's last frame.

        Args:
            lengths: int ``[n]``, how many frames of each row are real; of one at least.
            after: ``{key: [n, *shape]}`` of the carried leaves, after the last of them.
        """
        steps = self.num_steps
        newest = self.policy_version[np.arange(steps) < lengths[:, None]].max()
        for row, length in enumerate(lengths.tolist()):
            if length == steps:
                continue
            version = self.policy_version[row, length - 1] if length else newest
            ended = self.terminated[row, length - 1] or self.truncated[row, length - 1]
            if length and not ended:
                self.add_final(row, length - 1, after)
            for array in self.frames.values():
                array[row, length:] = 0
            for array in self.tail.values():
                array[row] = 0
            self.traj_ids[row, length:] = -1
            self.policy_version[row, length:] = version
        self.num_frames = int(lengths.sum())

    def tensors(self, *, mapped: bool = True) -> list[Any]:
        """The rollout as it travels: tensors, or SharedTensors in place of all but the first.

        They are this slab's memory: valid until it is used again.

        Args:
            mapped: whoever gets them can map shared memory; False: tensors in any case.
        """
        packed, *large = self._memory
        if self._final_at:
            final = (kept[: len(self._final_at)] for kept in self._final.values())
            packed = self._wire.with_final(packed, self._final_at, final)
        return [packed, *(self._stand_ins if mapped and self._stand_ins else large)]


@dataclass(frozen=True)
class Header:
    """What the trainer learns of a rollout before any of its data moves.

    Attributes:
        worker_id: the slot that collected it.
        incarnation: which process in that slot.
        sequence: counts the rollouts of this process from 0.
        num_frames: real frames in it; the others are padding.
        num_steps: T, steps of each row, with padding.
        num_bytes: size of its tensors.
        policy_version: (lowest, highest) version among its frames.
        stepped: frames its process has stepped in all.
        lost: of these, the frames that are in no rollout, by cause.
        env_faults: how often an env of its process raised.
        work: what its process has done.
        spans: what its process did when, for a trace; empty where there is none.
    """

    worker_id: int
    incarnation: int
    sequence: int
    num_frames: int
    num_steps: int
    num_bytes: int
    policy_version: tuple[int, int]
    stepped: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    env_faults: int = 0
    work: Work = NO_WORK
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """A rollout at the trainer: its header and its tensors in wire order."""

    header: Header
    tensors: Tensors


def _wire_of_rollout(layout: Layout, rollout: Rollout) -> _Wire:
    num_leaves = len(layout.per_frame) + len(layout.carried)
    mapped = len(rollout.tensors) > num_leaves
    return _wire_of(layout, rollout.header.num_steps, mapped=mapped)


def assemble(
    layout: Layout,
    rollouts: Sequence[Rollout],
    *,
    mask: bool = False,
    compact: bool = False,
    device: torch.device | None = None,
) -> TensorDict:
    """Build the batch from rollouts of one layout, in the order given.

    Args:
        layout: what every one of them consists of.
        rollouts: W rollouts of n rows and T steps each.
        mask: add ``("collector", "mask")``, bool ``[..., T]``, False where a frame is padding.
        compact: leave observations under "next" out.
        device: where the batch is wanted; None: where the tensors are. To a GPU it is copied from
            pinned memory on the current stream, which is not waited for.

    Returns:
        A TensorDict ``[W * n, T]`` whose last dimension is named "time". Its tensors share no
        memory with each other, and with the rollouts only where there is a single one, which it
        then takes over.

    Raises:
        ValueError: there is padding, and no mask to tell it by.
    """
    one = len(rollouts) == 1
    pinned = device is not None and device.type == "cuda"
    wires = [_wire_of_rollout(layout, rollout) for rollout in rollouts]
    parts = [wire.leaves(r.tensors) for wire, r in zip(wires, rollouts, strict=True)]

    def joined(index: int) -> torch.Tensor:
        first = parts[0][index]
        if one and not pinned:
            # Large leaves are taken over; small ones lie in one tensor, whose parts must part.
            return first if first.untyped_storage().nbytes() == first.nbytes else first.clone()
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        whole = recycler.empty(shape, first.dtype, pinned=pinned)
        return torch.cat([part[index] for part in parts], out=whole)

    flat = {leaf.key: joined(index) for index, leaf in enumerate(layout.per_frame)}
    reward = flat["reward",]
    rows, steps = reward.shape
    ends = [wire.final(r.tensors[0]) for wire, r in zip(wires, rollouts, strict=True)]
    final_at = torch.cat([at + k * layout.num_envs * steps for k, (at, _) in enumerate(ends)])

    following: dict[Key, torch.Tensor] = {}
    for index, leaf in enumerate(() if compact else layout.carried):
        root = flat[leaf.key]
        after = recycler.empty(tuple(root.shape), root.dtype, pinned=pinned)
        after[:, :-1] = root[:, 1:]
        after[:, -1] = torch.cat([part[len(layout.per_frame) + index] for part in parts])
        if len(final_at):
            final = torch.cat([values[index] for _, values in ends])
            after.view(rows * steps, *leaf.shape)[final_at] = final
        following[leaf.key] = after

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(-1)

    terminated, truncated = flat["terminated",], flat["truncated",]
    following["reward",] = column(reward)
    following["terminated",] = column(terminated)
    following["truncated",] = column(truncated)
    following["done",] = column(terminated | truncated)
    following.update((leaf.key, flat[leaf.key]) for leaf in layout.outcomes)
    roots = (*layout.carried, *layout.action, *layout.extras)
    batch = {leaf.key: flat[leaf.key] for leaf in roots}
    for name in ("done", "terminated", "truncated"):
        batch[name,] = torch.zeros((rows, steps, 1), dtype=torch.bool)
    tree = nested(batch)
    tree["next"] = nested(following)
    tree["collector"] = _collector(layout, rollouts, flat, mask=mask)
    out = TensorDict(tree, batch_size=[rows, steps], names=[None, "time"])
    return out if device is None else out.to(device, non_blocking=pinned)


def _collector(
    layout: Layout, rollouts: Sequence[Rollout], flat: dict[Key, torch.Tensor], *, mask: bool
) -> dict[str, torch.Tensor]:
    """What stands under "collector"."""
    traj_ids = flat[TRAJ_IDS]
    num_frames = sum(rollout.header.num_frames for rollout in rollouts)
    if num_frames < traj_ids.numel() and not mask:
        raise ValueError("a rollout is padded, so its batch needs a mask")
    worker_ids = torch.tensor([rollout.header.worker_id for rollout in rollouts])
    collector = {
        "traj_ids": traj_ids,
        "policy_version": flat[POLICY_VERSION],
        "faulted": flat[FAULTED],
        "worker_id": worker_ids.repeat_interleave(layout.num_envs)[:, None].repeat(
            1, traj_ids.shape[1]
        ),
    }
    if mask:
        collector[MASK[-1]] = traj_ids >= 0
    return collector
