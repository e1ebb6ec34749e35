"""IMPALA learns Crazy Climber, or another Atari game, from workers that never wait for it.

    python launch/train_impala.py                                       # starts its own workers
    torchrun --standalone --nproc-per-node=3 launch/train_impala.py     # one trainer, two workers

It needs the package's extra "atari". Each batch is a rollout of the worker that finishes first, and
new weights are sent while all workers go on collecting. So the policy that chose an action is a few
versions older than the one that learns from it (at most as many as Staleness allows). V-trace
corrects for that, by the probabilities that the workers stored. At the end the --out folder has
metrics.jsonl, learning_curve.png and policy.pt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict, deque
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from ale_py import AtariVectorEnv
from gymnasium.spaces import Discrete
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from tqdm import tqdm
from train_ppo import parser, plot

import distcollect as dc

GAMMA = 0.99  # discount of future rewards
RHO_MAX = 1.0  # bound of V-trace's importance weights, which decides which value is learned
C_MAX = 1.0  # bound that decides how far corrections reach along a trajectory
ENTROPY = 0.01  # bonus for the entropy of the policy
VALUE_WEIGHT = 0.5  # of the critic's loss, next to the actor's
LEARNING_RATE = 1e-3  # at the start; falls to 0 over --total-frames
MAX_GRAD_NORM = 0.5
MAX_POLICY_LAG = 2  # versions
WINDOW = 20  # number of episodes in the average return


class ActorCritic(nn.Module):
    """A small convolutional network with two heads: the policy and the value."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            layer(nn.Conv2d(4, 16, 8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(16, 32, 4, stride=2)),
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(32 * 9 * 9, 256)),
            nn.ReLU(),
        )
        self.actor = layer(nn.Linear(256, actions), gain=0.01)  # almost uniform at first
        self.critic = layer(nn.Linear(256, 1), gain=1.0)

    def forward(self, observation: Tensor) -> Distribution:
        """The policy: workers sample from it and store "action_log_prob" with each action."""
        return self.both(observation)[0]

    def both(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        """The policy for uint8 images ``[F, 4, 84, 84]``, and the expected return ``[F, 1]``."""
        features = self.body(observation / 255)
        policy = Categorical(logits=self.actor(features), validate_args=False)
        return policy, self.critic(features)


def layer(module: nn.Conv2d | nn.Linear, gain: float = 2**0.5) -> nn.Module:
    """Give a layer orthogonal weights, scaled by ``gain``, and return it."""
    nn.init.orthogonal_(module.weight, gain)
    assert module.bias is not None
    nn.init.zeros_(module.bias)
    return module


class VTrace(NamedTuple):
    """The result of V-trace, ``[rows, T, 1]``."""

    target: Tensor  # for the critic
    advantage: Tensor  # of the actions, times their importance weights


def vtrace(after: TensorDict, log_ratio: Tensor, value: Tensor, next_value: Tensor) -> VTrace:
    """V-trace (Espeholt et al. 2018, arXiv:1802.01561, section 4.1); all is ``[rows, T, 1]``.

    Args:
        after: the batch's "next".
        log_ratio: log of an action's probability in the learning policy over that in the policy
            that chose it.
        value: values of the states in which the steps were taken.
        next_value: values of the states after the steps; at the end of an episode that is its true
            final state, not the first state of the next episode.
    """
    ratio = log_ratio.exp()
    rho, c = ratio.clamp(max=RHO_MAX), ratio.clamp(max=C_MAX)
    reward, goes_on = after["reward"], ~after["done"]
    next_target = next_value * ~after["terminated"]
    delta = rho * (reward + GAMMA * next_target - value)
    target = torch.empty_like(value)
    # The target minus the value, one step ahead. It is 0 at the end of an episode or of the
    # rollout.
    ahead = torch.zeros_like(value[:, 0])
    for step in reversed(range(value.shape[1])):
        ahead = ahead * goes_on[:, step]
        next_target[:, step] += ahead
        ahead = delta[:, step] + GAMMA * c[:, step] * ahead
        target[:, step] = value[:, step] + ahead
    return VTrace(target, rho * (reward + GAMMA * next_target - value))


def next_values(model: ActorCritic, batch: TensorDict, value: Tensor) -> Tensor:
    """The critic's values of the states after the steps, ``[rows, T, 1]``."""
    # These are the values of the next row, except at the end of an episode or of the rollout.
    next_value = value.roll(-1, dims=1)
    ends = batch["next", "done"].squeeze(-1).clone()
    ends[:, -1] = True
    next_value[ends] = model.both(batch["next", "observation"][ends])[1]
    return next_value


def learn(
    model: ActorCritic, optimizer: torch.optim.Optimizer, batch: TensorDict
) -> dict[str, float]:
    """One update with a rollout; returns its losses and the mean clipped importance weight."""
    policy, value = model.both(batch["observation"].flatten(0, 1))
    log_prob = policy.log_prob(batch["action"].flatten()).view(*batch.shape, 1)
    value = value.view(*batch.shape, 1)
    with torch.no_grad():
        log_ratio = log_prob - batch["action_log_prob"][..., None]
        after = batch["next"].clone(recurse=False)
        after["reward"] = after["reward"].clamp(
            -1, 1
        )  # the size of rewards differs much between games
        target, advantage = vtrace(after, log_ratio, value, next_values(model, batch, value))
    actor_loss = -(log_prob * advantage).mean()
    critic_loss = (value - target).square().mean()
    entropy = policy.entropy().mean()
    loss = actor_loss + VALUE_WEIGHT * critic_loss - ENTROPY * entropy
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return {
        "actor_loss": actor_loss.item(),
        "critic_loss": critic_loss.item(),
        "entropy": entropy.item(),
        "importance_weight": log_ratio.exp().clamp(max=RHO_MAX).mean().item(),
    }


class Episodes:
    """Returns of finished episodes; rollouts of several workers arrive interleaved."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, float]] = []  # (frames so far, return)
        self.latest: deque[float] = deque(maxlen=WINDOW)
        self._running: dict[int, float] = defaultdict(float)  # by traj_id

    def add(self, batch: TensorDict, frames: int) -> None:
        """Add the rewards of a batch; ``frames``: number of frames with this batch."""
        traj_ids = batch["collector", "traj_ids"]
        for traj_id in traj_ids.unique().tolist():
            steps = batch["next"][traj_ids == traj_id]
            self._running[traj_id] += steps["reward"].sum().item()
            if steps["done"].any():
                total = self._running.pop(traj_id)
                self.finished.append((frames, total))
                self.latest.append(total)

    @property
    def average(self) -> float | None:
        """Average return of the latest episodes; None before the first has ended."""
        return fmean(self.latest) if self.latest else None

    def reached(self, target: float) -> bool:
        """Whether a full window's average is at least ``target``."""
        return len(self.latest) == WINDOW and fmean(self.latest) >= target


def make_env(game: str, num_envs: int) -> AtariVectorEnv:
    """The game in several envs: 4 grey images of 84x84, 4 frames of the game apart."""
    return AtariVectorEnv(
        game,
        num_envs,
        num_threads=1,
        reward_clipping=False,  # the learner clips them
        autoreset_mode="SameStep",
    )


def num_actions(game: str) -> int:
    """How many actions the game has."""
    env = make_env(game, 1)
    env.close()
    assert isinstance(env.single_action_space, Discrete)
    return int(env.single_action_space.n)


def main() -> None:
    """Train; runs only on the trainer."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the trainer shares the cores with the workers
    torch.manual_seed(args.seed)
    model = ActorCritic(num_actions(args.game))
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-5)
    num_batches = max(1, args.total_frames // args.frames_per_batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_batches)
    episodes, averages, solved = Episodes(), [], False

    collector = dc.RPCDataCollector(
        partial(make_env, args.game, args.envs_per_worker),
        model,
        frames_per_batch=args.frames_per_batch,
        total_frames=num_batches * args.frames_per_batch,
        num_workers=args.num_workers,
        envs_per_worker=args.envs_per_worker,
        staleness=dc.Staleness(MAX_POLICY_LAG),
        inference=dc.Inference(args.inference),
    )
    bar = tqdm(total=collector.total_frames, unit=" frames", unit_scale=True)
    start = time.monotonic()
    with collector, bar, (args.out / "metrics.jsonl").open("w", buffering=1) as metrics:
        collector.set_seed(args.seed)
        for batch in collector:
            lag = collector.version_lag
            assert lag is not None
            episodes.add(batch, collector.frames)
            losses = learn(model, optimizer, batch)
            schedule.step()
            collector.update_policy_weights_(model, wait=False)

            average, seconds = episodes.average, time.monotonic() - start
            row = {
                "frames": collector.frames,
                "seconds": round(seconds, 3),
                "frames_per_s": round(collector.frames / seconds, 1),
                "episodes": len(episodes.finished),
                "return": average,
                "policy_lag": lag.mean,
                "max_policy_lag": lag.max,
                **losses,
            }
            metrics.write(json.dumps(row) + "\n")
            bar.set_postfix({"return": average or 0.0, "policy lag": lag.mean}, refresh=False)
            bar.update(batch.numel())
            if average is not None:
                averages.append((collector.frames, average))
            solved = solved or episodes.reached(args.solved_at)
            if solved and not args.keep_going:
                break

    torch.save(model.state_dict(), args.out / "policy.pt")
    title = f"IMPALA on {args.game.replace('_', ' ').title()}"
    label = f"average of {WINDOW} episodes"
    path = args.out / "learning_curve.png"
    plot(path, title, label, averages, target=args.solved_at, episodes=episodes.finished)
    print(
        f"{'solved' if solved else 'not solved'}: average return {episodes.average or 0:,.1f} over "
        f"{len(episodes.latest)} episodes after {collector.frames:,} frames and {seconds:.0f} s; "
        f"metrics.jsonl, learning_curve.png and policy.pt are in {args.out}/"
    )
    if args.require_solved and not solved:
        sys.exit(1)


def parse_args() -> argparse.Namespace:
    """The command line."""
    measure = f"average return over {WINDOW} episodes"
    command = parser(__doc__, split="a worker's envs", measure=measure)
    add = command.add_argument
    add(
        "--inference",
        choices=["worker", "host", "auto"],
        default="worker",
        help="where actions are chosen",
    )
    add("--game", default="crazy_climber", help="the game's name in ale-py (%(default)s)")
    command.set_defaults(
        total_frames=250_000,
        frames_per_batch=160,
        envs_per_worker=8,
        out=Path("runs/impala_atari"),
        solved_at=20_000.0,
    )
    return command.parse_args()


if __name__ == "__main__":
    dc.run(main)
