"""Joins the leaves of several rollouts, and rebuilds what follows from them.

Both kinds of batches are made from these: :mod:`.assemble`, :mod:`.assemble_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcollect.common import tensor_cache
from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import FAULTED, MASK, POLICY_VERSION, TRAJ_IDS
from distcollect.rollout.spaces import Key, indexable
from distcollect.rollout.tree_layout import AnyLayout
from distcollect.rollout.wire import wire_layout


@dataclass(frozen=True)
class Columns:
    """The leaves of W rollouts of n rows and T steps.

    Attributes:
        flat: ``[W * n, T, *shape]`` for each leaf of a frame.
        following: the same for the carried leaves, as they are after each frame.
    """

    flat: dict[Key, torch.Tensor]
    following: dict[Key, torch.Tensor]


def join(
    layout: AnyLayout, rollouts: Sequence[Rollout], *, compact: bool = False, pinned: bool
) -> Columns:
    """Join the rollouts, one after the other.

    Args:
        layout: what a frame of each rollout consists of.
        rollouts: W rollouts of n rows and T steps each.
        compact: leave out what is after each frame.
        pinned: the columns are to be in pinned memory.

    Returns:
        Columns that share no memory with each other, and with a rollout only if there is just one:
        its large tensors are taken over.
    """
    one = len(rollouts) == 1
    wires = [wire_layout(layout, r.header.num_steps, r.header.wire_form) for r in rollouts]
    parts = [wire.leaves(r.tensors) for wire, r in zip(wires, rollouts, strict=True)]

    def joined(index: int) -> torch.Tensor:
        first = parts[0][index]
        if one and not pinned:
            # Packed leaves share one tensor, so each is copied out of it.
            return first if first.untyped_storage().nbytes() == first.nbytes else first.clone()
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        whole = tensor_cache.empty(shape, first.dtype, pinned=pinned)
        return torch.cat([part[index] for part in parts], out=whole)

    flat = {leaf.key: joined(index) for index, leaf in enumerate(layout.per_frame)}
    rows, steps = flat[TRAJ_IDS].shape
    ends = [wire.final(r.tensors[0]) for wire, r in zip(wires, rollouts, strict=True)]
    final_at = torch.cat([at + k * layout.num_envs * steps for k, (at, _) in enumerate(ends)])

    following: dict[Key, torch.Tensor] = {}
    for index, leaf in enumerate(() if compact else layout.carried):
        root = flat[leaf.key]
        after = tensor_cache.empty(tuple(root.shape), root.dtype, pinned=pinned)
        after[:, :-1] = root[:, 1:]
        after[:, -1] = torch.cat([part[len(layout.per_frame) + index] for part in parts])
        if len(final_at):
            final = torch.cat([values[index] for _, values in ends])
            indexable(after.view(rows * steps, *leaf.shape))[final_at] = indexable(final)
        following[leaf.key] = after
    return Columns(flat, following)


def bookkeeping(
    layout: AnyLayout,
    rollouts: Sequence[Rollout],
    flat: dict[Key, torch.Tensor],
    *,
    mask: bool,
) -> dict[str, torch.Tensor]:
    """The entries under "collector", ``[W * n, T]``.

    Raises:
        ValueError: there is padding, and ``mask`` is False.
    """
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
