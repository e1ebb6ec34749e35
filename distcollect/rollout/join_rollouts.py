"""Joins the leaves of several rollouts, and rebuilds what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch

from distcollect.common import tensor_cache
from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import ENDS, Layout
from distcollect.rollout.spaces import Key
from distcollect.rollout.wire import WireForm, WireLayout, wire_layout

# Several threads of torch's copy more faster than numpy does.
_COPIED_BY_NUMPY_BYTES = 1 << 20


def join(
    layout: Layout,
    rollouts: Sequence[Rollout],
    lead: tuple[int, ...],
    *,
    compact: bool = False,
    pinned: bool,
) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Join the rollouts, one after the other.

    Args:
        layout: what a frame of each rollout consists of.
        rollouts: W rollouts of n rows and T steps each.
        lead: the batch's dimensions, which order the frames as ``[W * n, T]`` does.
        compact: leave out what is after each frame, but for flags.
        pinned: the tensors are to be in pinned memory.

    Returns:
        ``[*lead, *shape]`` for each leaf of a frame, with the shape ``[1]`` for reward and flags;
        and the same for the state leaves, as they are after each frame, and the flag "done" that
        the other two make. The tensors share no memory with each other, and with a rollout only if
        there is just one: its large tensors are taken over.
    """
    n, steps = layout.num_envs, rollouts[0].header.num_steps
    shape, num_frames = (len(rollouts), n, steps), len(rollouts) * n * steps
    runs = _runs(layout, rollouts)
    parts = runs[0][0].parts([each.tensors for each in runs[0][1]])
    if len(runs) > 1:
        of_runs = [wire.parts([each.tensors for each in run]) for wire, run in runs]
        lists = ([p if isinstance(p, list) else [p] for p in each] for each in of_runs)
        parts = [[*chain.from_iterable(each)] for each in zip(*lists, strict=True)]

    flat: dict[Key, torch.Tensor] = {}
    arrays: dict[Key, np.ndarray] = {}  # the same, ``[W, n, T, *shape]``
    ends = () if layout.is_torchrl else ENDS
    for leaf, part in zip(layout.per_frame, parts, strict=False):
        key = leaf.key
        dims = lead + ((1,) if key in ends else leaf.shape)
        if type(part) is np.ndarray and not pinned:
            arrays[key] = array = part.copy()
            flat[key] = tensor_cache.tensor_of(array.reshape(dims), leaf.dtype)
        elif len(rollouts) == 1 and not pinned and _is_alone(part[0]):
            arrays[key] = tensor_cache.array_of(part[0])[None]
            flat[key] = part[0].view(dims)
        else:
            flat[key], array = tensor_cache.new(dims, leaf.dtype, pinned=pinned)
            arrays[key] = array.reshape(*shape, *leaf.shape)
            _fill(arrays[key], part)

    finals = _finals(runs, n * steps)
    following: dict[Key, torch.Tensor] = {}
    flags = layout.flags
    for index, leaf in enumerate(layout.state):
        if compact and leaf.key not in flags:
            continue
        tensor, array = tensor_cache.new((*lead, *leaf.shape), leaf.dtype, pinned=pinned)
        after = array.reshape(*shape, *leaf.shape)
        _copy(after[:, :, :-1], arrays[leaf.key][:, :, 1:])
        _fill(after[:, :, -1], parts[len(flat) + index])
        every = array.reshape(num_frames, *leaf.shape)
        for at, values in finals:
            every[at] = values[index]
        following[leaf.key] = tensor
    if ends:
        tensor, array = tensor_cache.new((*lead, 1), torch.bool, pinned=pinned)
        terminated, truncated = (arrays[name,] for name in ("terminated", "truncated"))
        np.logical_or(terminated, truncated, out=array.reshape(shape))
        following["done",] = tensor
    return flat, following


def _runs(layout: Layout, rollouts: Sequence[Rollout]) -> list[tuple[WireLayout, list[Rollout]]]:
    """Rollouts in a row that lie alike in their tensors, after the way in which they do."""

    def form(rollout: Rollout) -> tuple[int, WireForm]:
        return rollout.header.num_steps, rollout.header.wire_form

    return [(wire_layout(layout, *how), [*run]) for how, run in groupby(rollouts, form)]


def _finals(
    runs: Sequence[tuple[WireLayout, list[Rollout]]], num_frames: int
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Where episodes ended among the frames of all rollouts, and each state leaf's final values."""
    finals, start = [], 0
    for wire, run in runs:
        for rollout in run:
            if (final := wire.final(rollout.tensors[0])) is not None:
                finals.append((final[0] + start, final[1]))
            start += num_frames
    return finals


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return True if no other leaf lies in its memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _fill(whole: np.ndarray, parts: Any) -> None:
    """Copy a leaf of all rollouts into ``[W, *shape]``; see :meth:`.WireLayout.parts`."""
    start = 0
    for part in [parts] if isinstance(parts, np.ndarray) else parts:
        array = tensor_cache.array_of(part)[None] if isinstance(part, torch.Tensor) else part
        end = start + len(array)
        _copy(whole[start:end], array)
        start = end


def _copy(into: np.ndarray, array: np.ndarray) -> None:
    if into.nbytes < _COPIED_BY_NUMPY_BYTES:
        into[...] = array
    else:
        torch.from_numpy(into).copy_(torch.from_numpy(array))
