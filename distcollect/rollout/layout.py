"""What a frame consists of: its keys, and the leaves of a worker's rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distcollect.rollout.spaces import Key, Leaf

Tensors = list[torch.Tensor]

# Keys of what the collector itself writes into a batch.
TRAJ_IDS: Key = ("collector", "traj_ids")
POLICY_VERSION: Key = ("collector", "policy_version")
FAULTED: Key = ("collector", "faulted")
MASK: Key = ("collector", "mask")

_BOOKKEEPING = (
    Leaf(("reward",), (), torch.float32),
    Leaf(("terminated",), (), torch.bool),
    Leaf(("truncated",), (), torch.bool),
    Leaf(TRAJ_IDS, (), torch.int64),
    Leaf(POLICY_VERSION, (), torch.int64),
    Leaf(FAULTED, (), torch.bool),
)


@dataclass(frozen=True)
class Layout:
    """What a frame of one worker consists of; with a number of steps it fixes every shape.

    Attributes:
        num_envs: n, the rows of a rollout.
        state: leaves that a frame has at its start and at its end: observations, info entries,
            what a recurrent policy remembers.
        action: leaves of the action.
        extras: what else the policy writes, e.g. log-probabilities.
        outcomes: leaves that a frame has at its end only, beside the reward.
    """

    num_envs: int
    state: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    extras: tuple[Leaf, ...]
    outcomes: tuple[Leaf, ...] = ()

    @property
    def agent_flags(self) -> list[Key]:
        """Of a PettingZoo env: the flags of each group of agents, which are state leaves."""
        flags = ("done", "terminated", "truncated")
        return [(*reward.key[:-1], flag) for reward in self.outcomes for flag in flags]

    @property
    def per_frame(self) -> tuple[Leaf, ...]:
        """Leaves of shape ``[n, T, *shape]``, in the order in which they travel."""
        return (*self.state, *self.action, *self.extras, *self.outcomes, *_BOOKKEEPING)
