"""Joins the leaves of several rollouts, and rebuilds what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import numpy as np
import torch

from distcollect.common import tensor_cache
from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import TRAJ_IDS, Layout, Tensors
from distcollect.rollout.spaces import Key, indexable
from distcollect.rollout.wire import WireForm, WireLayout, wire_layout


def join(
    layout: Layout, rollouts: Sequence[Rollout], *, compact: bool = False, pinned: bool
) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Join the rollouts, one after the other.

    Args:
        layout: what a frame of each rollout consists of.
        rollouts: W rollouts of n rows and T steps each.
        compact: leave out what is after each frame, but for flags.
        pinned: the tensors are to be in pinned memory.

    Returns:
        ``[W * n, T, *shape]`` for each leaf of a frame; and the same for the state leaves, as they
        are after each frame. The tensors share no memory with each other, and with a rollout only
        if there is just one: its large tensors are taken over.
    """
    runs = list(_runs(layout, rollouts))
    taken, parts = None, []
    if len(rollouts) == 1 and not pinned:
        taken = runs[0][0].leaves(rollouts[0].tensors)
    else:
        of_runs = [wire.leaves_of_all([each.tensors for each in run]) for wire, run in runs]
        # For each leaf tensors [k, n, ...], which together hold that of all rollouts in order.
        parts = [[*chain.from_iterable(each)] for each in zip(*of_runs, strict=True)]

    def joined(index: int) -> torch.Tensor:
        if taken is not None:
            part = taken[index]
            # Packed leaves share one tensor, so each is copied out of it.
            return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
        first = parts[index][0]
        _, rows, *rest = first.shape
        shape = (len(rollouts) * rows, *rest)
        whole = tensor_cache.empty(shape, first.dtype, pinned=pinned)
        torch.cat(parts[index], out=whole.view(len(rollouts), rows, *rest))
        return whole

    flat = {leaf.key: joined(index) for index, leaf in enumerate(layout.per_frame)}
    rows, steps = flat[TRAJ_IDS].shape
    final_at, finals = _ends(layout, runs, steps)

    following: dict[Key, torch.Tensor] = {}
    flags = layout.flags
    for index, leaf in enumerate(layout.state):
        if compact and leaf.key not in flags:
            continue
        root = flat[leaf.key]
        after = tensor_cache.empty(tuple(root.shape), root.dtype, pinned=pinned)
        last = len(layout.per_frame) + index
        tail = torch.cat(parts[last]).flatten(0, 1) if taken is None else taken[last]
        torch.cat([root[:, 1:], tail.unsqueeze(1)], 1, out=after)
        if finals:
            indexable(after.view(rows * steps, *leaf.shape))[final_at] = indexable(finals[index])
        following[leaf.key] = after
    return flat, following


def _runs(
    layout: Layout, rollouts: Sequence[Rollout]
) -> Iterator[tuple[WireLayout, list[Rollout]]]:
    """Rollouts in a row that lie alike in their tensors, after the way in which they do."""

    def form(rollout: Rollout) -> tuple[int, WireForm]:
        return rollout.header.num_steps, rollout.header.wire_form

    for (num_steps, wire_form), run in groupby(rollouts, form):
        yield wire_layout(layout, num_steps, wire_form), list(run)


def _ends(
    layout: Layout, runs: Sequence[tuple[WireLayout, list[Rollout]]], steps: int
) -> tuple[torch.Tensor, Tensors]:
    """Where episodes ended: row times T plus step; and each state leaf's final values.

    Without any, no values.
    """
    places: list[np.ndarray] = []
    finals: list[list[np.ndarray]] = []
    each = ((wire, rollout) for wire, run in runs for rollout in run)
    for number, (wire, rollout) in enumerate(each):
        final = wire.final(rollout.tensors[0])
        if final is not None:
            at, values = final
            places.append(at + number * layout.num_envs * steps)
            finals.append(values)
    if not places:
        return torch.empty(0, dtype=torch.int64), []
    final_at = np.concatenate(places)
    of_leaves = zip(layout.state, zip(*finals, strict=True), strict=True)
    return torch.from_numpy(final_at), [
        _from_bytes(parts, (len(final_at), *leaf.shape), leaf.dtype) for leaf, parts in of_leaves
    ]


def _from_bytes(
    parts: Sequence[np.ndarray], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.concatenate(parts)).view(dtype).view(shape)
