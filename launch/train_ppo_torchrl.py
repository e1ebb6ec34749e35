"""PPO with TorchRL's modules, loss, advantages and replay buffer learns CartPole-v1.

    python launch/train_ppo_torchrl.py                                  # starts its own workers
    torchrun --standalone --nproc-per-node=3 launch/train_ppo_torchrl.py

The same as train_ppo.py, but all except the collection is TorchRL's: ProbabilisticActor, GAE,
ClipPPOLoss and a replay buffer that gives each frame once in every epoch. Batches of the collector
go straight into them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm
from train_ppo import (
    ACTIONS,
    CLIP,
    ENTROPY,
    ENV,
    EPOCHS,
    GAMMA,
    LAMBDA,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MINIBATCHES,
    OBSERVATIONS,
    VALUE_WEIGHT,
    Episodes,
    figures,
    finish,
    mlp,
    parser,
)

import distcollect as dc

PARTS = ("objective", "critic", "entropy")  # of the loss


def make_actor() -> Any:
    """The policy: it writes "logits", "action" and "action_log_prob" into the TensorDict."""
    logits = TensorDictModule(
        mlp(OBSERVATIONS, ACTIONS, gain=0.01), in_keys=["observation"], out_keys=["logits"]
    )
    return ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


class Learner:
    """Improves an actor and a critic with TorchRL's PPO."""

    def __init__(self, frames_per_batch: int, num_batches: int) -> None:
        self.actor = make_actor()
        self.critic = ValueOperator(mlp(OBSERVATIONS, 1, gain=1.0), in_keys=["observation"])
        self.advantage = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=self.critic)
        self.loss = ClipPPOLoss(
            self.actor,
            self.critic,
            clip_epsilon=CLIP,
            entropy_coeff=ENTROPY,
            critic_coeff=VALUE_WEIGHT,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(frames_per_batch),
            sampler=SamplerWithoutReplacement(),
            batch_size=frames_per_batch // MINIBATCHES,
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), LEARNING_RATE, eps=1e-5)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, num_batches)

    def learn(self, batch: TensorDict) -> dict[str, float]:
        """Learn from a batch ``[rows, T]``; returns the mean losses."""
        with torch.no_grad():
            self.advantage(batch)  # adds "advantage" and "value_target"
        totals: dict[str, float] = {}
        for _ in range(EPOCHS):
            self.buffer.empty()
            self.buffer.extend(batch.reshape(-1))
            for frames in self.buffer:
                losses = self.loss(frames)
                parts = {name: losses[f"loss_{name}"] for name in PARTS}
                loss: Any = torch.stack(list(parts.values())).sum()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), MAX_GRAD_NORM)
                self.optimizer.step()
                for name, part in parts.items():
                    mean = part.item() / (EPOCHS * MINIBATCHES)
                    totals[f"{name}_loss"] = totals.get(f"{name}_loss", 0.0) + mean
        self.schedule.step()
        return totals


def main() -> None:
    """Train; runs only on the trainer."""
    args = parse_args()
    torch.set_num_threads(1)  # the trainer shares the cores with the workers
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    num_batches = max(1, args.total_frames // args.frames_per_batch)
    learner = Learner(args.frames_per_batch, num_batches)
    episodes, solved = Episodes(), False

    collector = dc.RPCDataCollector(
        ENV,
        learner.actor,
        frames_per_batch=args.frames_per_batch,
        total_frames=num_batches * args.frames_per_batch,
        num_workers=args.num_workers,
        envs_per_worker=args.envs_per_worker,
        sync=True,
    )
    bar = tqdm(total=collector.total_frames, unit=" frames", unit_scale=True)
    start = time.monotonic()
    with collector, bar, (args.out / "metrics.jsonl").open("w", buffering=1) as metrics:
        collector.set_seed(args.seed)
        for batch in collector:
            episodes.add(batch)
            versions = batch["collector", "policy_version"]
            lag = collector.policy_version - versions.double().mean().item()  # 0: on-policy
            losses = learner.learn(batch)
            collector.update_policy_weights_(learner.actor)

            row = figures(episodes, time.monotonic() - start, lag, losses)
            metrics.write(json.dumps(row) + "\n")
            bar.set_postfix({"return": episodes.average or 0.0}, refresh=False)
            bar.update(batch.numel())
            solved = solved or episodes.reached(args.solved_at)
            if solved and not args.keep_going:
                break

    title = f"PPO with TorchRL's loss on {ENV}"
    finish(args, title, learner.actor, episodes, time.monotonic() - start, solved=solved)


def parse_args() -> argparse.Namespace:
    """The command line."""
    command = parser(__doc__)
    command.set_defaults(out=Path("runs/ppo_torchrl"))
    return command.parse_args()


if __name__ == "__main__":
    dc.run(main)
