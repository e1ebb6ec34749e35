"""Turns the tensors of one or more rollouts into the batch that the user gets.

The batch has TorchRL's keys. What follows from the tensors that travelled is rebuilt here: ``next``
observations, ``done``, ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from distcollect.rollout.assemble_tree import assemble_tree
from distcollect.rollout.columns import bookkeeping, join
from distcollect.rollout.header import Rollout
from distcollect.rollout.spaces import nested
from distcollect.rollout.tree_layout import AnyLayout, TreeLayout


def assemble(
    layout: AnyLayout,
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
        A TensorDict ``[W * n, T]`` (for a loose layout ``[W, *batch_size, T]``) whose last
        dimension is named "time". Its tensors share no memory with each other. They share memory
        with a rollout only if there is just one: its large tensors are taken over.

    Raises:
        ValueError: there is padding, and ``mask`` is False.
    """
    if isinstance(layout, TreeLayout):
        return assemble_tree(layout, rollouts, mask=mask, compact=compact, device=device)
    pinned = device is not None and device.type == "cuda"
    columns = join(layout, rollouts, compact=compact, pinned=pinned)
    flat, following = columns.flat, columns.following
    rows, steps = flat["reward",].shape

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(-1)

    terminated, truncated = flat["terminated",], flat["truncated",]
    following["reward",] = column(flat["reward",])
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
    tree["collector"] = bookkeeping(layout, rollouts, flat, mask=mask)
    out = TensorDict(tree, batch_size=[rows, steps], names=[None, "time"])
    return out if device is None else out.to(device, non_blocking=pinned)
