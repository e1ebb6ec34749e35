"""What a frame of a TorchRL env consists of: the entries of its nested TensorDicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.spaces import Key, Leaf

_BOOKKEEPING = (
    Leaf(TRAJ_IDS, (), torch.int64),
    Leaf(POLICY_VERSION, (), torch.int64),
    Leaf(FAULTED, (), torch.bool),
)


@dataclass(frozen=True)
class TreeLayout:
    """What a frame of one worker consists of where TorchRL envs are stepped.

    Keys of entries under "next" are written without "next".

    Attributes:
        batch_size: of the env; n, the rows of a rollout, is the product of its dimensions.
        state: leaves that a frame has at its root and under "next".
        root_only: leaves that a frame has only at its root: the action, what the policy writes.
        next_only: leaves that a frame has only under "next": rewards.
        nodes: for each nested TensorDict that has more batch dimensions than the env, its key
            (with "next") and the dimensions that it adds.
        rewards: keys of the rewards.
        done: keys of the "done" flags that end a trajectory: the env's own, or if it has none,
            those of its parts.
        flags: keys of all flags: "done", "terminated", "truncated".
        is_loose: frames have entries without a fixed shape or that are no tensors. Then a rollout
            is a stack of TensorDicts as the env gave them, and the leaves above are empty.
    """

    batch_size: tuple[int, ...]
    state: tuple[Leaf, ...] = ()
    root_only: tuple[Leaf, ...] = ()
    next_only: tuple[Leaf, ...] = ()
    nodes: tuple[tuple[Key, tuple[int, ...]], ...] = ()
    rewards: tuple[Key, ...] = ()
    done: tuple[Key, ...] = ()
    flags: tuple[Key, ...] = ()
    is_loose: bool = False

    @property
    def num_envs(self) -> int:
        """n, the rows of a rollout."""
        return math.prod(self.batch_size)

    @property
    def per_frame(self) -> tuple[Leaf, ...]:
        """Leaves of shape ``[n, T, *shape]``, in the order in which they travel."""
        return (*self.state, *self.root_only, *self.next_only, *_BOOKKEEPING)


AnyLayout: TypeAlias = Layout | TreeLayout


def scalars(layout: AnyLayout) -> set[Key]:
    """Keys of the entries of a batch that have one number per frame, as the batch names them."""
    if isinstance(layout, TreeLayout):
        root: tuple[Leaf, ...] = (*layout.state, *layout.root_only)
        following: tuple[Leaf, ...] = (*layout.state, *layout.next_only)
    else:
        root = (*layout.state, *layout.action, *layout.extras)
        following = (*layout.state, *layout.outcomes)
    keys = {leaf.key for leaf in root if math.prod(leaf.shape) == 1}
    keys |= {("next", *leaf.key) for leaf in following if math.prod(leaf.shape) == 1}
    if not isinstance(layout, TreeLayout):
        keys |= {("next", name) for name in ("reward", "terminated", "truncated")}
    return keys


def row_dims(layout: AnyLayout, *, squeeze: bool) -> tuple[int, ...]:
    """The dimensions of the rows of one rollout in a batch.

    Args:
        layout: of the rollout.
        squeeze: a single env has no row dimension.
    """
    dims = layout.batch_size if isinstance(layout, TreeLayout) else (layout.num_envs,)
    if isinstance(layout, Layout) and squeeze and layout.num_envs == 1:
        return ()
    return dims or (() if squeeze else (1,))


def is_private(key: Any) -> bool:
    """Whether a key, or a part of it, begins with an underscore; such entries are not delivered."""
    parts = (key,) if isinstance(key, str) else key
    return any(part.startswith("_") for part in parts)
