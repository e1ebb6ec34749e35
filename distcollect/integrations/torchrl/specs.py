"""The layout of the frames of TorchRL envs. This module imports torchrl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection

from distcollect.integrations.torchrl.envs import TorchRLEnvs
from distcollect.rollout.layout import Layout, TorchRLKeys
from distcollect.rollout.spaces import Key, Leaf


def layout_of(envs: TorchRLEnvs, first: TensorDictBase, chosen: TensorDictBase) -> Layout:
    """The layout of the frames.

    Args:
        envs: the envs; their specs say what a step gives.
        first: what their reset returned.
        chosen: the same after the policy was called with it; what differs was written by it.
    """
    env = envs.members[0]
    lead = tuple(envs.batch_size)
    env_dims = len(env.batch_size)
    flags = tuple(_key(key) for key in env.done_keys)
    done = tuple(key for key in flags if key[-1] == "done" and not _is_below_another(key, flags))
    keys = TorchRLKeys(tuple(_key(key) for key in env.reward_keys), done, flags)
    template = env.fake_tensordict()
    if _is_dynamic(env) or _is_loose(template) or (len(envs.members) == 1 and _is_loose(chosen)):
        return Layout(lead, torchrl_keys=keys, is_loose=True)
    root = dict(_leaves(template.exclude("next"), env_dims))
    following = dict(_leaves(template.get("next"), env_dims))
    nodes = dict(_nodes(template, env_dims))
    known = dict(_leaves(first, len(lead)))
    for key, leaf in _leaves(chosen, len(lead)):
        if key[0] == "next":
            following.setdefault(key[1:], Leaf(key[1:], leaf.shape, leaf.dtype))
        elif key not in known or key in root:
            root[key] = leaf
    nodes |= {key: dims for key, dims in _nodes(chosen, len(lead)) if key not in nodes}
    state = tuple(leaf for key, leaf in root.items() if key in following)
    return Layout(
        lead,
        state=state,
        extras=tuple(leaf for key, leaf in root.items() if key not in following),
        outcomes=tuple(leaf for key, leaf in following.items() if key not in root),
        nodes=tuple((key, dims) for key, dims in nodes.items() if dims),
        torchrl_keys=keys,
    )


def _is_below_another(key: Key, flags: tuple[Key, ...]) -> bool:
    """Whether a TensorDict above that of the flag has flags: only these reset the env."""
    return any(len(other) < len(key) and other[:-1] == key[: len(other) - 1] for other in flags)


def _key(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _leaves(td: TensorDictBase, num_dims: int) -> Iterator[tuple[Key, Leaf]]:
    """The leaves that are delivered, without ``num_dims`` batch dimensions."""
    for name, value in td.items(include_nested=True, leaves_only=True):
        key = _key(name)
        # Entries whose names begin with an underscore are not delivered.
        is_private = any(part.startswith("_") for part in key)
        if not is_private and key[0] != "collector":
            yield key, Leaf(key, tuple(value.shape[num_dims:]), value.dtype)


def _nodes(td: TensorDictBase, num_dims: int) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """The nested TensorDicts, and the dimensions that each adds to the batch size."""
    for name, value in td.items(include_nested=True):
        if is_tensor_collection(value):
            yield _key(name), tuple(value.batch_size[num_dims:])


def _is_dynamic(env: Any) -> bool:
    """Whether an entry has a dimension of unknown size."""
    specs = (env.output_spec, env.input_spec)
    leaves = (leaf for spec in specs for leaf in spec.values(True, True))
    return any(-1 in leaf.shape for leaf in leaves)


def _is_loose(td: TensorDictBase) -> bool:
    """Whether an entry has no fixed shape or is no tensor."""
    if isinstance(td, LazyStackedTensorDict):
        return True
    for value in td.values():
        if is_tensor_collection(value):
            is_plain = isinstance(value, TensorDictBase)
            if not is_plain or _is_loose(value):
                return True
        elif not isinstance(value, torch.Tensor) or value.is_nested:
            return True
    return False
