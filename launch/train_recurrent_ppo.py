"""Learns CartPole-v1 without velocities by recurrent PPO: the policy needs a memory.

    python launch/train_recurrent_ppo.py
    torchrun --standalone --nproc-per-node=3 launch/train_recurrent_ppo.py

The policy carries a hidden state from frame to frame, and a batch has the state before each frame.
The learner cuts a batch into short sequences, and computes each one again from its first state. The
state is reset where ``is_init`` marks the start of an episode. The average return reaches 400 after
some 200,000 frames; without memory (--feed-forward) it stays near 50. Everything else is as in
train_ppo.py.
"""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from train_ppo import ACTIONS, ENV, GAMMA, ActorCritic, linear, parser, train

import distcollect as dc

POSITIONS = [0, 2]  # of the cart, and the pole's angle
HIDDEN = 64
SEQUENCE_LENGTH = 16  # frames that gradients flow through
RETURN = 1 / (1 - GAMMA)  # the largest possible discounted return
VALUE_WEIGHT = 0.5 / RETURN**2  # so that the critic doesn't dominate the memory that both share


class PositionsOnly(gym.ObservationWrapper):
    """Leaves the velocities out of the observation."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(space.low[POSITIONS], space.high[POSITIONS])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[POSITIONS]


def make_env() -> gym.Env:
    """The env maker; workers call it."""
    return PositionsOnly(gym.make(ENV))


class RecurrentActorCritic(nn.Module):
    """A recurrent cell that the actor and the critic share."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRUCell(len(POSITIONS), HIDDEN)
        self.actor = linear(HIDDEN, ACTIONS, gain=0.01)  # almost uniform at the start
        self.critic = linear(HIDDEN, 1, gain=1.0)

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """The state at the start of an episode."""
        return {"hidden": torch.zeros(num_envs, HIDDEN)}

    def forward(
        self, observation: Tensor, hidden: Tensor, is_init: Tensor
    ) -> tuple[Categorical, dict[str, Tensor]]:
        """The policy: workers store the "hidden" and "is_init" that each frame starts with."""
        hidden = self.memory(observation, hidden * ~is_init)
        return self.policy(hidden), {"hidden": hidden}

    def policy(self, hidden: Tensor) -> Categorical:
        """Probabilities of the actions."""
        return Categorical(logits=self.actor(hidden), validate_args=False)

    def value(self, frames: TensorDict) -> Tensor:
        """The expected return from each frame, ``[..., 1]``, computed from its stored state."""
        before = frames["hidden"]
        after = self.memory(frames["observation"].flatten(0, -2), before.flatten(0, -2))
        value: Tensor = self.critic(after.view_as(before))
        return RETURN * value

    def evaluate(self, sequences: TensorDict) -> tuple[Categorical, Tensor]:
        """The policy and the value in each frame, computed from the first frame's stored state."""
        hidden = sequences["hidden"][:, 0]
        each = []
        for observation, is_init in zip(
            sequences["observation"].unbind(1), sequences["is_init"].unbind(1), strict=True
        ):
            hidden = self.memory(observation, hidden * ~is_init)
            each.append(hidden)
        hidden = torch.stack(each, 1)
        return self.policy(hidden), RETURN * self.critic(hidden)


def main() -> None:
    """Train; runs on the trainer only."""
    command = parser(__doc__)
    command.add_argument("--feed-forward", action="store_true", help="use a policy without memory")
    command.set_defaults(
        frames_per_batch=2048,
        envs_per_worker=8,
        solved_at=400.0,
        out=Path("runs/recurrent_ppo_cartpole"),
    )
    args = command.parse_args()
    rows = args.num_workers * args.envs_per_worker
    if args.frames_per_batch % (rows * SEQUENCE_LENGTH):
        command.error(
            f"--frames-per-batch {args.frames_per_batch} must be a multiple of "
            f"{rows * SEQUENCE_LENGTH}: {rows} envs, and sequences of {SEQUENCE_LENGTH} frames"
        )
    torch.set_num_threads(1)  # the trainer shares the cores with the workers
    torch.manual_seed(args.seed)
    title = f"PPO on {ENV} without velocities"
    if args.feed_forward:
        train(args, f"Feed-forward {title}", make_env, ActorCritic(len(POSITIONS)))
        return
    train(
        args,
        f"Recurrent {title}",
        make_env,
        RecurrentActorCritic(),
        sequence_length=SEQUENCE_LENGTH,
        value_weight=VALUE_WEIGHT,
    )


if __name__ == "__main__":
    dc.run(main)
