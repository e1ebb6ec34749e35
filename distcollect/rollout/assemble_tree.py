"""Turns the tensors of rollouts of TorchRL envs into the batch that the user gets.

It has exactly the entries that TorchRL's collectors give, with their nested batch sizes, and those
of :mod:`.assemble` under "collector".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor

from distcollect.rollout.header import Rollout
from distcollect.rollout.join_rollouts import bookkeeping, join
from distcollect.rollout.layout import TRAJ_IDS
from distcollect.rollout.pickled_rollout import stacked, unpacked
from distcollect.rollout.spaces import Key, as_key
from distcollect.rollout.tree_layout import TreeLayout
from distcollect.rollout.wire import wire_layout


def assemble_tree(
    layout: TreeLayout,
    rollouts: Sequence[Rollout],
    *,
    mask: bool = False,
    compact: bool = False,
    device: torch.device | None = None,
) -> TensorDict:
    """Build the batch; see :func:`~distcollect.rollout.assemble.assemble`.

    Returns:
        A TensorDict ``[W * n, T]``; for a loose layout ``[W, *batch_size, T]``.

    Raises:
        ValueError: there is padding, and ``mask`` is False.
    """
    if layout.is_loose:
        return _loose(layout, rollouts, mask=mask, compact=compact, device=device)
    pinned = device is not None and device.type == "cuda"
    columns = join(layout, rollouts, pinned=pinned)
    root = {leaf.key: columns.flat[leaf.key] for leaf in (*layout.state, *layout.root_only)}
    following = {leaf.key: columns.flat[leaf.key] for leaf in layout.next_only}
    for leaf in layout.state:
        if not compact or leaf.key in layout.flags:
            following[leaf.key] = columns.following[leaf.key]
    rows, steps = columns.flat[TRAJ_IDS].shape
    entries: dict[Key, torch.Tensor] = {**root}
    entries.update((("next", *key), value) for key, value in following.items())
    nodes = dict(layout.nodes)
    tree = _tree(entries, (), (rows, steps), nodes)
    tree["collector"] = bookkeeping(rollouts, columns.flat, mask=mask)
    out = TensorDict(tree, batch_size=[rows, steps], names=[None, "time"])
    return out if device is None else out.to(device, non_blocking=pinned)


def _tree(
    entries: dict[Key, torch.Tensor],
    at: Key,
    lead: tuple[int, ...],
    nodes: dict[Key, tuple[int, ...]],
) -> dict[str, Any]:
    """The entries below ``at``, as nested TensorDicts.

    Args:
        entries: by their keys from ``at`` on.
        at: the key of the TensorDict that holds them.
        lead: its batch size.
        nodes: the dimensions that nested TensorDicts add to the root's batch size.
    """
    tree: dict[str, Any] = {}
    branches: dict[str, dict[Key, torch.Tensor]] = {}
    for (name, *rest), value in entries.items():
        if rest:
            branches.setdefault(name, {})[tuple(rest)] = value
        else:
            tree[name] = value
    for name, branch in branches.items():
        key = (*at, name)
        size = (*lead[:2], *nodes[key]) if key in nodes else lead
        tree[name] = TensorDict(_tree(branch, key, size, nodes), batch_size=size)
    return tree


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


def _loose(
    layout: TreeLayout,
    rollouts: Sequence[Rollout],
    *,
    mask: bool,
    compact: bool,
    device: torch.device | None,
) -> TensorDict:
    parts: list[TensorDictBase] = []
    for rollout in rollouts:
        wire = wire_layout(layout, rollout.header.num_steps, rollout.header.wire_form)
        leaves = zip(layout.per_frame, wire.leaves([rollout.tensors[0]]), strict=True)
        flat = {leaf.key: value.clone() for leaf, value in leaves}
        part = unpacked(rollout.tensors)
        if compact:
            _drop_repeated(part, layout.flags)
        entries = bookkeeping([rollout], flat, mask=mask)
        values = {name: value.reshape(part.batch_size) for name, value in entries.items()}
        part.set("collector", TensorDict(values, batch_size=part.batch_size))
        parts.append(part)
    whole: Any = stacked(parts, 0)
    whole.names = [*[None] * (whole.ndim - 1), "time"]
    return whole if device is None else whole.to(device)
