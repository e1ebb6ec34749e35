"""What a frame consists of: its keys, and the leaves of a worker's rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from distcollect.rollout.spaces import Key, Leaf

Tensors = list[torch.Tensor]

# Keys of what the collector itself writes into a batch.
TRAJ_IDS: Key = ("collector", "traj_ids")
POLICY_VERSION: Key = ("collector", "policy_version")
FAULTED: Key = ("collector", "faulted")
MASK: Key = ("collector", "mask")

# What ends a frame, ``[n, T]`` in a rollout and ``[..., 1]`` in a batch.
ENDS: dict[Key, Leaf] = {
    (name,): Leaf((name,), (), torch.float32 if name == "reward" else torch.bool)
    for name in ("reward", "terminated", "truncated")
}
_BOOKKEEPING = (
    Leaf(TRAJ_IDS, (), torch.int64),
    Leaf(POLICY_VERSION, (), torch.int64),
    Leaf(FAULTED, (), torch.bool),
)


@dataclass(frozen=True)
class TorchRLKeys:
    """Where the frames of a TorchRL env have their rewards and flags; without "next".

    Attributes:
        rewards: keys of the rewards.
        done: keys of the "done" flags that end a trajectory: the env's own, or if it has none,
            those of its parts.
        flags: keys of all flags: "done", "terminated", "truncated".
    """

    rewards: tuple[Key, ...]
    done: tuple[Key, ...]
    flags: tuple[Key, ...]


@dataclass(frozen=True)
class Layout:
    """What a frame of one worker consists of; with a number of steps it fixes every shape.

    Attributes:
        batch_size: of the envs; n, the rows of a rollout, is the product of its dimensions.
        state: leaves that a frame has at its start and at its end: observations, info entries,
            what a recurrent policy remembers; a TorchRL env's flags.
        action: leaves of the action.
        extras: what else the policy writes, e.g. log-probabilities. With TorchRL envs, all that a
            frame has only at its root.
        outcomes: leaves that a frame has at its end only; beside reward and flags, unless
            ``torchrl_keys`` says where these are.
        torchrl_keys: None: the envs are not TorchRL's.
        nodes: for each nested TensorDict that has more batch dimensions than the env, its key
            (with "next") and the dimensions that it adds.
        normalized: those of ``state`` that the policy sees normalised, see
            :class:`~distcollect.Normalize`. Frames have them as the env gave them.
        is_loose: frames have entries without a fixed shape or that are no tensors. Then a rollout
            is a stack of TensorDicts as the env gave them, and the leaves above are empty.
        skew: a row makes at most so many times T frames in a rollout of T steps; 1: all rows make
            one in each step.
    """

    batch_size: tuple[int, ...]
    state: tuple[Leaf, ...] = ()
    action: tuple[Leaf, ...] = ()
    extras: tuple[Leaf, ...] = ()
    outcomes: tuple[Leaf, ...] = ()
    torchrl_keys: TorchRLKeys | None = None
    nodes: tuple[tuple[Key, tuple[int, ...]], ...] = ()
    normalized: tuple[Leaf, ...] = ()
    is_loose: bool = False
    skew: int = 1

    @property
    def num_envs(self) -> int:
        """n, the rows of a rollout."""
        return math.prod(self.batch_size)

    @property
    def is_torchrl(self) -> bool:
        """Return True if the envs are TorchRL's: batches, seeds and checkpoints are as there."""
        return self.torchrl_keys is not None

    @cached_property
    def is_deep(self) -> bool:
        """Return True if entries of a batch lie in a TensorDict of their own."""
        return any(len(leaf.key) > 1 for leaf in (*self.root, *self.outcomes))

    @cached_property
    def flags(self) -> list[Key]:
        """The flags of episodes' ends among the state leaves: of agents, or a TorchRL env's."""
        if self.torchrl_keys is not None:
            return list(self.torchrl_keys.flags)
        names = ("done", "terminated", "truncated")
        return [(*reward.key[:-1], name) for reward in self.outcomes for name in names]

    @cached_property
    def root(self) -> tuple[Leaf, ...]:
        """Leaves at the root of a frame; those that end it are not among them."""
        return (*self.state, *self.action, *self.extras)

    @cached_property
    def per_frame(self) -> tuple[Leaf, ...]:
        """Leaves of shape ``[n, T, *shape]``, in the order in which they travel."""
        ends = () if self.is_torchrl else ENDS.values()
        return (*self.root, *self.outcomes, *ends, *_BOOKKEEPING)

    def scalars(self) -> set[Key]:
        """Keys of the entries of a batch with one number per frame, as the batch names them."""
        ends = () if self.is_torchrl else ENDS.values()
        keys = {leaf.key for leaf in self.root if math.prod(leaf.shape) == 1}
        following = (*self.state, *self.outcomes, *ends)
        return keys | {("next", *leaf.key) for leaf in following if math.prod(leaf.shape) == 1}

    def row_dims(self, *, squeeze: bool) -> tuple[int, ...]:
        """The dimensions of the rows of one rollout in a batch.

        Args:
            squeeze: a single env has no row dimension.
        """
        if squeeze and not self.is_torchrl and self.num_envs == 1:
            return ()
        return self.batch_size or (() if squeeze else (1,))
