"""Turns the tensors of one or more rollouts into the batch that the user gets.

The batch has TorchRL's keys. What follows from the tensors that travelled is rebuilt here: ``next``
observations, ``done``, ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from distcollect.rollout.assemble_tree import assemble_tree
from distcollect.rollout.header import Rollout
from distcollect.rollout.join_rollouts import bookkeeping, join
from distcollect.rollout.layout import Layout
from distcollect.rollout.spaces import Key, nested
from distcollect.rollout.tree_layout import AnyLayout, TreeLayout


def assemble(
    layout: AnyLayout,
    rollouts: Sequence[Rollout],
    *,
    mask: bool = False,
    compact: bool = False,
    device: torch.device | None = None,
    shape: tuple[int, ...] | None = None,
) -> TensorDict:
    """Build the batch from rollouts of one layout, in the order given.

    Args:
        layout: what a frame of each rollout consists of.
        rollouts: W rollouts of n rows and T steps each.
        mask: add ``("collector", "mask")``, bool ``[W * n, T]``, False where a frame is padding.
        compact: leave out the observations under "next".
        device: where the batch is wanted; None: where the tensors are. A batch for a GPU is copied
            from pinned memory on the current stream, without waiting for the copy.
        shape: the batch's, which orders the frames as ``[W * n, T]`` does; None: that.

    Returns:
        A TensorDict ``shape`` (for a loose layout ``[W, *batch_size, T]``) whose last dimension is
        named "time". Its tensors share no memory with each other. They share memory with a rollout
        only if there is just one: its large tensors are taken over.

    Raises:
        ValueError: there is padding, and ``mask`` is False.
    """
    if isinstance(layout, TreeLayout):
        return assemble_tree(layout, rollouts, mask=mask, compact=compact, device=device)
    pinned = device is not None and device.type == "cuda"
    columns = join(layout, rollouts, compact=compact, pinned=pinned)
    flat, following = columns.flat, columns.following
    lead = flat["reward",].shape if shape is None else shape

    def viewed(tensor: torch.Tensor, *rest: int) -> torch.Tensor:
        # Each operation takes long in a process that sleeps between two batches.
        return tensor if shape is None else tensor.view(*lead, *rest)

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(*lead, 1)

    terminated, truncated = flat["terminated",], flat["truncated",]
    after = {key: viewed(tensor, *tensor.shape[2:]) for key, tensor in following.items()}
    after["reward",] = column(flat["reward",])
    after["terminated",] = column(terminated)
    after["truncated",] = column(truncated)
    after["done",] = column(terminated | truncated)
    after.update((leaf.key, viewed(flat[leaf.key], *leaf.shape)) for leaf in layout.outcomes)
    _cut_agents(layout, after)
    roots = (*layout.state, *layout.action, *layout.extras)
    batch = {leaf.key: viewed(flat[leaf.key], *leaf.shape) for leaf in roots}
    for name in ("done", "terminated", "truncated"):
        batch[name,] = torch.zeros((*lead, 1), dtype=torch.bool)
    tree = nested(batch)
    tree["next"] = nested(after)
    kept = bookkeeping(rollouts, flat, mask=mask)
    tree["collector"] = {name: viewed(tensor) for name, tensor in kept.items()}
    out = TensorDict(tree, batch_size=lead, names=[*[None] * (len(lead) - 1), "time"])
    return out if device is None else out.to(device, non_blocking=pinned)


def _cut_agents(layout: Layout, after: dict[Key, torch.Tensor]) -> None:
    """Mark agents truncated and done where their env is cut and they are not done yet.

    The env itself does not know of a cut: of ``max_frames_per_traj``, or of a fault.
    """
    for reward in layout.outcomes:  # one for each group of a PettingZoo env
        keys = [(*reward.key[:-1], name) for name in ("truncated", "done")]
        truncated, done = (after[key] for key in keys)
        cut = after["truncated",].unsqueeze(-1) & ~done
        truncated |= cut
        done |= cut
