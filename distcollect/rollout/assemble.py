"""Turns the tensors of one or more rollouts into the batch that the user gets.

The batch has TorchRL's keys. What follows from the tensors that travelled is rebuilt here: ``next``
observations, ``done``, ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from distcollect.common import tensor_cache
from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import FAULTED, MASK, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.spaces import Key, indexable, nested
from distcollect.rollout.wire import wire_layout


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
        layout: what a frame of each rollout consists of.
        rollouts: W rollouts of n rows and T steps each.
        mask: add ``("collector", "mask")``, bool ``[W * n, T]``, False where a frame is padding.
        compact: leave out the observations under "next".
        device: where the batch is wanted; None: where the tensors are. A batch for a GPU is copied
            from pinned memory on the current stream, without waiting for the copy.

    Returns:
        A TensorDict ``[W * n, T]`` whose last dimension is named "time". Its tensors share no
        memory with each other. They share memory with a rollout only if there is just one: its
        large tensors are taken over.

    Raises:
        ValueError: there is padding, and ``mask`` is False.
    """
    one = len(rollouts) == 1
    pinned = device is not None and device.type == "cuda"
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
    reward = flat["reward",]
    rows, steps = reward.shape
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
    """The entries under "collector"."""
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
