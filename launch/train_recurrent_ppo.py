"""Recurrent PPO learns CartPole-v1 without velocities: what moves, only memory can tell.

    python launch/train_recurrent_ppo.py
    torchrun --standalone --nproc-per-node=3 launch/train_recurrent_ppo.py

The policy carries a hidden state from frame to frame, and batches have the one before each frame.
So the learner cuts them into short sequences and goes through each from the state it began with,
which starts anew where ``is_init`` says that an episode does. It takes some 200,000 frames to an
average return of 400, while a policy without memory (--feed-forward) stays near 50. All else is as
in train_ppo.py.
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
RETURN = 1 / (1 - GAMMA)  # no discounted return is larger
VALUE_WEIGHT = 0.5 / RETURN**2  # the critic is not to drown out the actor in their common memory


class PositionsOnly(gym.ObservationWrapper):
    """Shows where things are, but not how fast they move."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(space.low[POSITIONS], space.high[POSITIONS])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[POSITIONS]


def make_env() -> gym.Env:
    """One of each worker's."""
    return PositionsOnly(gym.make(ENV))


class RecurrentActorCritic(nn.Module):
    """One memory, and on top of it: which action to choose, and what return to expect."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRUCell(len(POSITIONS), HIDDEN)
        self.actor = linear(HIDDEN, ACTIONS, gain=0.01)  # almost uniform at first
        self.critic = linear(HIDDEN, 1, gain=1.0)

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        """What episodes begin with."""
        return {"hidden": torch.zeros(num_envs, HIDDEN)}

    def forward(
        self, observation: Tensor, hidden: Tensor, is_init: Tensor
    ) -> tuple[Categorical, dict[str, Tensor]]:
        """The policy: workers store "hidden" and "is_init" as they are before each frame."""
        hidden = self.memory(observation, hidden * ~is_init)
        return self.policy(hidden), {"hidden": hidden}

    def policy(self, hidden: Tensor) -> Categorical:
        """Probabilities of the actions."""
        return Categorical(logits=self.actor(hidden), validate_args=False)

    def value(self, frames: TensorDict) -> Tensor:
        """Expected return from each frame on, ``[..., 1]``, by its stored state."""
        before = frames["hidden"]
        after = self.memory(frames["observation"].flatten(0, -2), before.flatten(0, -2))
        value: Tensor = self.critic(after.view_as(before))
        return RETURN * value

    def evaluate(self, sequences: TensorDict) -> tuple[Categorical, Tensor]:
        """The policy and the value in each frame, from the first one's stored state on."""
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
    """Train; runs on the trainer alone."""
    command = parser(__doc__)
    command.add_argument("--feed-forward", action="store_true", help="see it fail without memory")
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
