"""SAC with TorchRL's modules, loss and replay buffer learns Pendulum-v1.

    python launch/train_sac_torchrl.py                                  # starts its own workers
    torchrun --standalone --nproc-per-node=3 launch/train_sac_torchrl.py

The same as train_sac.py, but all except the collection is TorchRL's: ProbabilisticActor with a
TanhNormal, SACLoss, SoftUpdate and a TensorDictReplayBuffer, which workers fill in the background.
The loop around them is that of train_sac.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from train_sac import (
    ACTIONS,
    CAPACITY,
    ENV,
    GAMMA,
    LEARNING_RATE,
    OBSERVATIONS,
    TARGET_ENTROPY,
    TARGET_RATE,
    mlp,
    parse_args,
    train,
)

import distcollect as dc


class Value(nn.Module):
    """The expected return after an action."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(OBSERVATIONS + ACTIONS, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """``[n, 1]`` for n observations and actions."""
        value: Tensor = self.body(torch.cat([observation, action], -1))
        return value


def make_actor() -> Any:
    """The policy: it writes "loc", "scale", "action" and "action_log_prob"."""
    parameters = TensorDictModule(
        nn.Sequential(mlp(OBSERVATIONS, 2 * ACTIONS), NormalParamExtractor()),
        in_keys=["observation"],
        out_keys=["loc", "scale"],
    )
    return ProbabilisticActor(
        parameters,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0},
        spec=Bounded(-1.0, 1.0, (ACTIONS,)),
        return_log_prob=True,
    )


class Learner:
    """Improves an actor and two critics with TorchRL's SAC."""

    def __init__(self) -> None:
        self.actor = make_actor()
        critic = ValueOperator(
            Value(), in_keys=["observation", "action"], out_keys=["state_action_value"]
        )
        self.loss = SACLoss(
            self.actor, critic, num_qvalue_nets=2, target_entropy=TARGET_ENTROPY, loss_function="l2"
        )
        self.loss.make_value_estimator(gamma=GAMMA)
        self.follow = SoftUpdate(self.loss, tau=TARGET_RATE)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), LEARNING_RATE)

    def learn(self, frames: TensorDict) -> dict[str, Tensor]:
        """One update; returns its losses, the entropy and the temperature."""
        losses = self.loss(frames)
        loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.follow.step()
        return {
            "critic_loss": losses["loss_qvalue"].detach(),
            "actor_loss": losses["loss_actor"].detach(),
            "entropy": losses["entropy"].detach(),
            "temperature": losses["alpha"].detach(),
        }


def main() -> None:
    """Train; runs only on the trainer."""
    args = parse_args(__doc__, Path("runs/sac_torchrl"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    train(args, Learner, buffer, f"SAC with TorchRL's loss on {ENV}")


if __name__ == "__main__":
    dc.run(main)
