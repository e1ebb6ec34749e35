"""SAC with TorchRL's modules, loss and replay buffer learns Pendulum-v1.

    python launch/train_sac_torchrl.py                                  # starts its own workers
    torchrun --standalone --nproc-per-node=3 launch/train_sac_torchrl.py

The same as train_sac.py, but all except the collection is TorchRL's: ProbabilisticActor with a
TanhNormal, SACLoss, SoftUpdate and a TensorDictReplayBuffer, which workers fill in the background.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from tqdm import tqdm
from train_ppo import plot
from train_sac import (
    ACTIONS,
    CAPACITY,
    ENV,
    EPISODES,
    GAMMA,
    LEARNING_RATE,
    OBSERVATIONS,
    RANDOM_FRAMES,
    SAMPLES,
    TARGET_ENTROPY,
    TARGET_RATE,
    UPDATES_PER_FRAME,
    UPDATES_PER_PUSH,
    make_env,
    mlp,
    parse_args,
)

import distcollect as dc


class Value(nn.Module):
    """The expected return after an action."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(OBSERVATIONS + ACTIONS, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """``[n, 1]`` for n observations and actions."""
        value: torch.Tensor = self.body(torch.cat([observation, action], -1))
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

    def learn(self, frames: TensorDict) -> dict[str, float]:
        """One update; returns its losses, the entropy and the temperature."""
        losses = self.loss(frames)
        loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.follow.step()
        return {
            "critic_loss": losses["loss_qvalue"].item(),
            "actor_loss": losses["loss_actor"].item(),
            "entropy": losses["entropy"].item(),
            "temperature": losses["alpha"].item(),
        }


def main() -> None:
    """Train; runs only on the trainer."""
    args = parse_args(__doc__, Path("runs/sac_torchrl"))
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the trainer shares the cores with the workers
    torch.manual_seed(args.seed)
    learner = Learner()
    returns: list[tuple[int, float]] = []
    solved = False

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=SAMPLES)
    replay = dc.RateLimited(
        buffer, samples_per_insert=SAMPLES * UPDATES_PER_FRAME, min_size=RANDOM_FRAMES
    )
    collector = dc.RPCDataCollector(
        make_env,
        learner.actor,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        num_workers=args.num_workers,
        envs_per_worker=args.envs_per_worker,
        init_random_frames=RANDOM_FRAMES,
        replay_buffer=replay,
    )
    bar = tqdm(total=collector.total_frames, unit=" frames", unit_scale=True)
    start = time.monotonic()
    with collector, bar, (args.out / "metrics.jsonl").open("w", buffering=1) as metrics:
        collector.set_seed(args.seed)
        collector.start()
        updates = 0
        while collector.is_running and not (solved and not args.keep_going):
            losses = learner.learn(replay.sample())
            updates += 1
            if updates % UPDATES_PER_PUSH == 0:
                collector.update_policy_weights_(learner.actor, wait=False)
            if updates % args.updates_per_evaluation:
                continue

            collector.update_policy_weights_(learner.actor)  # evaluations use the newest weights
            evaluation = collector.evaluate(EPISODES, seed=args.seed)
            row = {
                "frames": collector.frames,
                "seconds": round(time.monotonic() - start, 3),
                "updates": updates,
                "return": evaluation.mean_return,
                **losses,
            }
            metrics.write(json.dumps(row) + "\n")
            returns.append((collector.frames, evaluation.mean_return))
            solved = solved or evaluation.mean_return >= args.solved_at
            bar.set_postfix({"return": evaluation.mean_return}, refresh=False)
            bar.update(collector.frames - bar.n)

    torch.save(learner.actor.state_dict(), args.out / "policy.pt")
    label = f"mean of {EPISODES} evaluated episodes"
    title = f"SAC with TorchRL's loss on {ENV}"
    plot(args.out / "learning_curve.png", title, label, returns, target=args.solved_at)
    print(
        f"{'solved' if solved else 'not solved'}: mean return of {EPISODES} episodes "
        f"{returns[-1][1] if returns else float('nan'):.1f} after {collector.frames:,} frames, "
        f"{updates:,} updates and {time.monotonic() - start:.0f} s; "
        f"metrics.jsonl, learning_curve.png and policy.pt are in {args.out}/"
    )
    if args.require_solved and not solved:
        sys.exit(1)


if __name__ == "__main__":
    dc.run(main)
