"""A small run of TorchRL's Trainer. Importing this imports torchrl."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own entries
    from torchrl.collectors import BaseCollector
    from torchrl.trainers import ReplayBufferTrainer, Trainer, UpdateWeights

__all__ = ["BaseCollector"]


def make_env() -> GymEnv:
    """An env with actions of one-hot vectors."""
    return GymEnv("CartPole-v1")


def make_policy() -> QValueActor:
    """The policy that is trained."""
    return QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=make_env().action_spec)


def make_buffer() -> TensorDictReplayBuffer:
    """A buffer for all frames of a run."""
    return TensorDictReplayBuffer(storage=LazyTensorStorage(200), batch_size=10)


def make_trainer(collector: Any, policy: QValueActor, total_frames: int, **more: Any) -> Trainer:
    """A trainer that samples from the collector's buffer, or else fills one of its own."""
    loss = DQNLoss(policy, action_space="one-hot", delay_value=False)
    trainer = Trainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), lr=0.1),
        optim_steps_per_batch=2,
        progress_bar=False,
        seed=1,
        **more,
    )

    def weights() -> TensorDictBase:
        return TensorDict.from_module(policy).data

    buffer = make_buffer() if collector.replay_buffer is None else collector.replay_buffer
    ReplayBufferTrainer(buffer, batch_size=10).register(trainer)
    UpdateWeights(collector, 1, policy_weights_getter=weights).register(trainer)
    return trainer
