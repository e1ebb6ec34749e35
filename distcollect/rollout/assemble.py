"""Turns the tensors of one or more rollouts into the batch that the user gets.

The batch has TorchRL's keys, and with TorchRL envs exactly the entries that TorchRL's collectors
give. What follows from the tensors that travelled is rebuilt here: ``next`` observations, ``done``,
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from distcollect.rollout.collector_entries import collector_entries
from distcollect.rollout.header import Rollout
from distcollect.rollout.join_rollouts import join
from distcollect.rollout.layout import ENDS, Layout
from distcollect.rollout.pickled_rollout import stacked, unpacked
from distcollect.rollout.spaces import Key, as_key, nested
from distcollect.rollout.wire import wire_layout


def assemble(
    layout: Layout,
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
    if layout.is_loose:
        return _loose(layout, rollouts, mask=mask, compact=compact, device=device)
    pinned = device is not None and device.type == "cuda"
    size = torch.Size(shape or (len(rollouts) * layout.num_envs, rollouts[0].header.num_steps))
    flat, after = join(layout, rollouts, size, compact=compact, pinned=pinned)
    after.update((leaf.key, flat[leaf.key]) for leaf in layout.outcomes)
    tree = nested({leaf.key: flat[leaf.key] for leaf in layout.root})
    if not layout.is_torchrl:
        after.update((key, flat[key]) for key in ENDS)
        for name in ("done", "terminated", "truncated"):
            tree[name] = torch.from_numpy(np.zeros((*size, 1), bool))
        _cut_agents(layout, after)

    names = [*[None] * (len(size) - 1), "time"]

    def made(tree: dict[str, Any]) -> TensorDict:
        # Without the checks of TensorDict(), which take half of the time in which a batch is made.
        return TensorDict._new_unsafe(tree, batch_size=size, names=names[:])  # noqa: SLF001

    tree["next"] = made(nested(after))
    tree["collector"] = made(collector_entries(rollouts, flat, mask=mask))
    out = made(tree)
    if layout.is_deep:
        out.names = out.names  # those that it made of dicts have none
    for key, dims in layout.nodes:
        if (node := out.get(key, None)) is not None:
            node.batch_size = (*size, *dims)
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


def _loose(
    layout: Layout,
    rollouts: Sequence[Rollout],
    *,
    mask: bool,
    compact: bool,
    device: torch.device | None,
) -> TensorDict:
    parts: list[TensorDictBase] = []
    for rollout in rollouts:
        wire = wire_layout(layout, rollout.header.num_steps, rollout.header.wire_form)
        leaves = zip(layout.per_frame, wire.leaves(rollout.tensors[:-1]), strict=True)
        flat = {leaf.key: value.clone() for leaf, value in leaves}
        part = unpacked(rollout.tensors)
        if compact:
            _drop_repeated(part, layout.flags)
        entries = collector_entries([rollout], flat, mask=mask)
        values = {name: value.reshape(part.batch_size) for name, value in entries.items()}
        part.set("collector", TensorDict(values, batch_size=part.batch_size))
        parts.append(part)
    whole: Any = stacked(parts, 0)
    whole.names = [*[None] * (whole.ndim - 1), "time"]
    return whole if device is None else whole.to(device)


def _drop_repeated(frames: TensorDictBase, flags: Sequence[Key]) -> None:
    """Delete what is under "next" and also at the root, but for the flags of an episode's end."""
    following: TensorDictBase = frames.get("next")
    at_root, at_next = (
        each.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
        for each in (frames, following)
    )
    known = {*at_root}
    kept = [key for key in at_next if key not in known or as_key(key) in flags]
    frames.set("next", following.select(*kept))
