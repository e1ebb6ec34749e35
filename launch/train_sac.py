"""SAC learns Pendulum-v1 from a replay buffer that workers fill while it trains.

    python launch/train_sac.py                                          # starts its own workers
    python launch/train_sac.py --prioritized                            # prioritised replay
    torchrun --standalone --nproc-per-node=3 launch/train_sac.py        # one trainer, two workers

The trainer waits for no batch: workers collect with the newest actor that they have, and the
trainer samples from the replay buffer. RateLimited keeps the number of updates per frame constant,
however fast either side is. At the end the --out folder has metrics.jsonl, learning_curve.png and
policy.pt.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution
from tqdm import tqdm
from train_ppo import parser, plot, positive

import distcollect as dc

ENV = "Pendulum-v1"
OBSERVATIONS, ACTIONS, HIDDEN = 3, 1, 128
GAMMA = 0.99  # discount of future rewards
TARGET_ENTROPY = -1.0 * ACTIONS  # of the policy; the temperature is learned to reach it
TARGET_RATE = 0.005  # of the target critics, in each update
LEARNING_RATE = 1e-3
CAPACITY = 100_000  # frames in the replay buffer
RANDOM_FRAMES = 1000  # frames with random actions before the first update
SAMPLES = 128  # frames that an update learns from
UPDATES_PER_FRAME = 1.0
UPDATES_PER_PUSH = 20  # updates between two publications of the actor
EPISODES = 10  # in an evaluation


class SquashedNormal(TransformedDistribution):
    """A normal distribution, squashed by tanh to values between -1 and 1."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        # The cache avoids the inverse of tanh, which is infinite for a value rounded to 1.
        drawn = Independent(Normal(mean, std, validate_args=False), 1)
        super().__init__(drawn, [TanhTransform(cache_size=1)], validate_args=False)

    @property
    def mode(self) -> Tensor:
        """The action without exploration."""
        middle: Tensor = self.transforms[0](self.base_dist.mean)
        return middle


class Actor(nn.Module):
    """The policy. Workers need nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(OBSERVATIONS, 2 * ACTIONS)

    def forward(self, observation: Tensor) -> SquashedNormal:
        """Workers sample from it; evaluations take its mode."""
        mean, log_std = self.body(observation).chunk(2, -1)
        return SquashedNormal(mean, log_std.clamp(-5, 2).exp())


class Critics(nn.Module):
    """Two estimates of the expected return after an action."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(mlp(OBSERVATIONS + ACTIONS, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """``[2, F, 1]`` for F frames."""
        both = torch.cat([observation, action], -1)
        return torch.stack([body(both) for body in self.bodies])


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, outputs),
    )


class Ring:
    """A replay buffer of the newest frames; the collector needs no method but ``extend``."""

    KEYS = (
        "observation",
        "action",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "terminated"),
    )

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: TensorDict | None = None
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, self._capacity)

    def extend(self, frames: TensorDict) -> Tensor:
        """Add frames ``[F]``; they replace the oldest ones. Returns where they are."""
        frames = frames.select(*self.KEYS)
        if self._frames is None:
            self._frames = frames[:1].expand(self._capacity).clone()
        index = (self._added + torch.arange(len(frames))) % self._capacity
        self._frames[index] = frames
        self._added += len(frames)
        return index

    def __getitem__(self, index: Tensor) -> TensorDict:
        assert self._frames is not None
        return self._frames[index]

    def sample(self, num_frames: int) -> TensorDict:
        """A random sample of the frames, ``[num_frames]``."""
        return self[torch.randint(len(self), (num_frames,))]


class Learner:
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), with a learned temperature."""

    def __init__(self) -> None:
        self.actor, self.critics = Actor(), Critics()
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        learned = [*self.actor.parameters(), *self.critics.parameters(), self.log_temperature]
        self.optimizer = torch.optim.Adam(learned, LEARNING_RATE, fused=True)

    def learn(self, frames: TensorDict) -> dict[str, Tensor]:
        """One update; returns its losses, the entropy and the temperature."""
        temperature = self.log_temperature.exp().detach()
        target = self.target(frames["next"], temperature)
        error = self.critics(frames["observation"], frames["action"]) - target
        frames["td_error"] = error.detach().abs().mean(0)
        weight = frames.get("priority_weight", torch.ones(len(frames)))[:, None]  # without: all 1
        critic_loss = (weight * error**2).mean()

        policy = self.actor(frames["observation"])
        action = policy.rsample()
        log_prob = policy.log_prob(action)[..., None]
        self.critics.requires_grad_(False)  # the actor's loss must not change them
        value = self.critics(frames["observation"], action).amin(0)
        self.critics.requires_grad_(True)
        actor_loss = (temperature * log_prob - value).mean()
        entropy = -log_prob.detach().mean()
        temperature_loss = self.log_temperature * (entropy - TARGET_ENTROPY)

        self.optimizer.zero_grad()
        (critic_loss + actor_loss + temperature_loss).backward()
        self.optimizer.step()
        self.follow()
        return {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "entropy": entropy,
            "temperature": temperature,
        }

    @torch.no_grad()
    def target(self, after: TensorDict, temperature: Tensor) -> Tensor:
        """Targets of the critics, ``[F, 1]``, from the frames' "next"."""
        policy = self.actor(after["observation"])
        action = policy.sample()
        log_prob = policy.log_prob(action)[..., None]
        value = self.target_critics(after["observation"], action).amin(0)
        # A truncated episode would go on: its future is estimated at its true final observation.
        future = ~after["terminated"] * (value - temperature * log_prob)
        target: Tensor = after["reward"] + GAMMA * future
        return target

    @torch.no_grad()
    def follow(self) -> None:
        """Move the target critics a little towards the critics."""
        pairs = zip(self.target_critics.parameters(), self.critics.parameters(), strict=True)
        for target, weight in pairs:
            target.lerp_(weight, TARGET_RATE)


def make_env() -> gym.Env[Any, Any]:
    """Pendulum, with torques from -1 to 1."""
    return gym.wrappers.RescaleAction(gym.make(ENV), np.float32(-1), np.float32(1))


def main() -> None:
    """Train; runs only on the trainer."""
    train(parse_args(), Learner, Ring(CAPACITY), f"SAC on {ENV}")


def train(
    args: argparse.Namespace, make_learner: Callable[[], Any], buffer: Any, title: str
) -> None:
    """Train until the target is reached or all frames are collected.

    Args:
        args: of the command line, see :func:`parse_args`.
        make_learner: makes an object with an ``actor`` and the method ``learn`` of
            :class:`Learner`, once torch's generator has its seed.
        buffer: the replay buffer.
        title: of the learning curve.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the trainer shares the cores with the workers
    torch.manual_seed(args.seed)
    learner = make_learner()
    returns: list[tuple[int, float]] = []
    solved = False

    replay = dc.RateLimited(
        dc.Prioritized(buffer) if args.prioritized else buffer,
        samples_per_insert=SAMPLES * UPDATES_PER_FRAME,
        min_size=RANDOM_FRAMES,
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
            sample = replay.sample(SAMPLES)
            losses = learner.learn(sample)
            if args.prioritized:  # leaves out frames that were overwritten meanwhile
                replay.update_tensordict_priority(sample)
            updates += 1
            if updates % UPDATES_PER_PUSH == 0:
                collector.update_policy_weights_(learner.actor, wait=False)
            if updates % args.updates_per_evaluation:
                continue

            collector.update_policy_weights_(learner.actor)  # evaluations use the newest weights
            evaluation = collector.evaluate(EPISODES, seed=args.seed)
            frames, seconds = collector.frames, time.monotonic() - start
            row = {
                "frames": frames,
                "seconds": round(seconds, 3),
                "updates": updates,
                "return": evaluation.mean_return,
                "policy_version": collector.policy_version,
                **{name: loss.item() for name, loss in losses.items()},
            }
            metrics.write(json.dumps(row) + "\n")
            returns.append((frames, evaluation.mean_return))
            solved = solved or evaluation.mean_return >= args.solved_at
            bar.set_postfix({"return": evaluation.mean_return}, refresh=False)
            bar.update(frames - bar.n)

    torch.save(learner.actor.state_dict(), args.out / "policy.pt")
    label = f"mean of {EPISODES} evaluated episodes"
    path = args.out / "learning_curve.png"
    plot(path, title, label, returns, target=args.solved_at)
    last = f"{returns[-1][1]:.1f}" if returns else "unknown"
    print(
        f"{'solved' if solved else 'not solved'}: mean return of {EPISODES} episodes {last} after "
        f"{collector.frames:,} frames, {updates:,} updates and {time.monotonic() - start:.0f} s; "
        f"metrics.jsonl, learning_curve.png and policy.pt are in {args.out}/"
    )
    if args.require_solved and not solved:
        sys.exit(1)


def parse_args(
    description: str | None = __doc__, out: Path = Path("runs/sac_pendulum")
) -> argparse.Namespace:
    """The command line of a script with this description, which writes to ``out``."""
    measure = f"mean return of {EPISODES} evaluated episodes"
    command = parser(description, split="a worker's envs", measure=measure)
    add = command.add_argument
    add("--updates-per-evaluation", type=positive, default=1000, help="%(default)s")
    add("--prioritized", action="store_true", help="sample frames by their last error")
    command.set_defaults(
        total_frames=30_000,
        frames_per_batch=50,
        envs_per_worker=1,
        out=out,
        solved_at=-200.0,
    )
    return command.parse_args()


if __name__ == "__main__":
    dc.run(main)
