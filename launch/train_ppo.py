"""PPO learns CartPole-v1 from environments that are stepped in other processes.

    python launch/train_ppo.py                                          # starts its own workers
    torchrun --standalone --nproc-per-node=3 launch/train_ppo.py        # one trainer, two workers

Both do the same: collect a batch with the newest policy, learn from it, send the new weights to
the workers, until the average return over 100 episodes is high enough. Then the --out folder has
metrics.jsonl, learning_curve.png and policy.pt. The other examples use parts of this script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

import distcollect as dc

ENV = "CartPole-v1"
OBSERVATIONS, ACTIONS, HIDDEN = 4, 2, 64
GAMMA = 0.98  # discount of future rewards
LAMBDA = 0.95  # of the advantage estimate: 0 trusts the critic alone, 1 the sampled returns alone
CLIP = 0.2  # how far an action's probability may move in one batch
ENTROPY = 0.001  # bonus for the entropy of the policy
VALUE_WEIGHT = 0.5  # of the critic's loss, next to the actor's
LEARNING_RATE = 1e-3  # at the start; falls to 0 over --total-frames
MAX_GRAD_NORM = 0.5
EPOCHS, MINIBATCHES = 10, 4
WINDOW = 100  # number of episodes in the average return


class ActorCritic(nn.Module):
    """Two networks: which action to choose, and what return to expect."""

    def __init__(self, observations: int = OBSERVATIONS) -> None:
        super().__init__()
        self.actor = mlp(observations, ACTIONS, gain=0.01)  # almost uniform at first
        self.critic = mlp(observations, 1, gain=1.0)

    def forward(self, observation: Tensor) -> Categorical:
        """The policy: workers sample from it and store "action_log_prob" with each action."""
        return Categorical(logits=self.actor(observation), validate_args=False)

    def value(self, frames: TensorDict) -> Tensor:
        """Expected return from each frame on, ``[..., 1]``."""
        value: Tensor = self.critic(frames["observation"])
        return value

    def evaluate(self, sequences: TensorDict) -> tuple[Categorical, Tensor]:
        """The policy and the value in each frame, for frames ``[n, t]``."""
        return self(sequences["observation"]), self.value(sequences)


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        linear(inputs, HIDDEN),
        nn.Tanh(),
        linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        linear(HIDDEN, outputs, gain),
    )


def linear(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A layer that starts with orthogonal weights, scaled by ``gain``."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def gae(after: TensorDict, value: Tensor, next_value: Tensor) -> Tensor:
    """Generalised advantage estimates. Arguments and result are ``[rows, T, 1]``.

    Args:
        after: the batch's "next".
        value: values of the states in which the steps were taken.
        next_value: values of the states after the steps; at the end of an episode that is its true
            final state, not the first state of the next episode.
    """
    # A terminated episode has no further rewards. A truncated one would have, and next_value
    # estimates them. No advantage extends past the end of an episode.
    delta = after["reward"] + GAMMA * next_value * ~after["terminated"] - value
    advantage = torch.empty_like(delta)
    ahead = torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        ahead = delta[:, step] + GAMMA * LAMBDA * ahead * ~after["done"][:, step]
        advantage[:, step] = ahead
    return advantage


class Losses(nn.Module):
    """The loss of PPO."""

    def __init__(self, model: Any, value_weight: float = VALUE_WEIGHT) -> None:
        super().__init__()
        self.model, self.value_weight = model, value_weight

    def forward(self, sequences: TensorDict) -> tuple[Tensor, Tensor]:
        """The loss for frames ``[n, t]``, and its parts: actor, critic, entropy."""
        policy, value = self.model.evaluate(sequences)
        ratio = (policy.log_prob(sequences["action"]) - sequences["action_log_prob"]).exp()
        gain = sequences["advantage"].squeeze(-1)
        gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        actor_loss = -torch.min(gain * ratio, gain * clipped).mean()
        critic_loss = (value - sequences["target"]).square().mean()
        entropy = policy.entropy().mean()
        loss = actor_loss + self.value_weight * critic_loss - ENTROPY * entropy
        return loss, torch.stack([actor_loss, critic_loss, entropy]).detach()


def learn(
    model: Any,
    losses: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: TensorDict,
    sequence_length: int = 1,
) -> dict[str, float]:
    """Improve the model with a batch, many sequences at a time.

    Args:
        model: the model to train.
        losses: the loss of the model.
        optimizer: an optimizer of the model's parameters.
        batch: ``[rows, T]``.
        sequence_length: in frames; T is a multiple of it. Only recurrent models need it.

    Returns:
        The mean losses.
    """
    with torch.no_grad():
        value, next_value = model.value(batch), model.value(batch["next"])
        advantage = gae(batch["next"], value, next_value)
    frames = batch.exclude("next", "collector", "done", "terminated", "truncated")
    frames["advantage"], frames["target"] = advantage, advantage + value
    # From here on the order of the sequences doesn't matter.
    num_sequences = batch.shape[1] // sequence_length
    sequences = frames.unflatten(1, (num_sequences, sequence_length)).flatten(0, 1)
    totals = torch.zeros(3)
    for _ in range(EPOCHS):
        for pick in torch.randperm(len(sequences)).chunk(MINIBATCHES):
            loss, parts = losses(sequences[pick])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            totals += parts * len(pick)
    means = (totals / (EPOCHS * len(sequences))).tolist()
    return dict(zip(["actor_loss", "critic_loss", "entropy"], means, strict=True))


class Episodes:
    """Returns of finished episodes; each row of a batch continues that row of the last batch."""

    def __init__(self) -> None:
        self.frames = 0
        self.finished: list[tuple[int, float]] = []  # (frames so far, return)
        self.latest: deque[float] = deque(maxlen=WINDOW)
        self.averages: list[tuple[int, float]] = []  # (frames so far, average) after each batch
        self._running: Tensor | None = None

    def add(self, batch: TensorDict) -> None:
        """Add the rewards of a batch."""
        rewards, dones = batch["next", "reward"], batch["next", "done"]
        if self._running is None:
            self._running = torch.zeros_like(rewards[:, 0])
        for reward, done in zip(rewards.unbind(1), dones.unbind(1), strict=True):
            self.frames += reward.numel()
            self._running += reward
            for total in self._running[done].tolist():
                self.finished.append((self.frames, total))
                self.latest.append(total)
            self._running[done] = 0
        if self.average is not None:
            self.averages.append((self.frames, self.average))

    @property
    def average(self) -> float | None:
        """Average return of the latest episodes; None before the first has ended."""
        return fmean(self.latest) if self.latest else None

    def reached(self, target: float) -> bool:
        """Whether a full window's average is at least ``target``."""
        return len(self.latest) == WINDOW and fmean(self.latest) >= target


def plot(
    path: Path,
    title: str,
    label: str,
    averages: list[tuple[int, float]],
    *,
    target: float,
    episodes: list[tuple[int, float]] | None = None,
) -> None:
    """Draw the learning curve.

    Args:
        path: path of the image.
        title: title of the plot.
        label: name of the averages.
        averages: (frames, average return).
        target: the return at which the task counts as solved.
        episodes: (frames, return) of single episodes.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(target, color="tab:green", linestyle="--", label=f"solved at {target:g}")
    if episodes:
        axes.plot(*zip(*episodes, strict=True), ".", color="0.75", ms=3, label="episodes")
    if averages:
        axes.plot(*zip(*averages, strict=True), color="tab:blue", lw=2, label=label)
    axes.set(title=title, xlabel="frames", ylabel="return", xlim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train; runs only on the trainer."""
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)  # the trainer shares the cores with the workers
    torch.manual_seed(args.seed)
    train(args, f"PPO on {ENV}", ENV, ActorCritic())


def train(
    args: argparse.Namespace,
    title: str,
    env: Any,
    model: Any,
    *,
    sequence_length: int = 1,
    value_weight: float = VALUE_WEIGHT,
) -> None:
    """Collect batches and learn from them, until the model is good enough.

    Args:
        args: the command line.
        title: title of the learning curve.
        env: the env, as the collector takes it.
        model: a model with the methods of :class:`ActorCritic`.
        sequence_length: see :func:`learn`.
        value_weight: weight of the critic's loss.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    losses = Losses(model, value_weight)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-5)
    num_batches = max(1, args.total_frames // args.frames_per_batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_batches)
    episodes, solved = Episodes(), False

    collector = dc.RPCDataCollector(
        env,
        model,
        frames_per_batch=args.frames_per_batch,
        total_frames=num_batches * args.frames_per_batch,
        num_workers=args.num_workers,
        envs_per_worker=args.envs_per_worker,
        sync=True,
    )
    checkpoint, is_resumed = None, False
    if args.checkpoint is not None:
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        checkpoint = dc.Checkpoint(args.checkpoint, collector=collector, **parts)
        is_resumed = checkpoint.load()
    episodes.frames = collector.frames
    bar = tqdm(
        total=collector.total_frames, initial=episodes.frames, unit=" frames", unit_scale=True
    )
    start = time.monotonic()
    mode = "a" if is_resumed else "w"
    with collector, bar, (args.out / "metrics.jsonl").open(mode, buffering=1) as metrics:
        if not is_resumed:
            collector.set_seed(args.seed)
        for batch in collector:
            episodes.add(batch)
            versions = batch["collector", "policy_version"]
            lag = collector.policy_version - versions.double().mean().item()  # 0: on-policy
            means = learn(model, losses, optimizer, batch, sequence_length)
            schedule.step()
            if checkpoint is not None:
                checkpoint.step()
            collector.update_policy_weights_(model)

            row = figures(episodes, time.monotonic() - start, lag, means)
            metrics.write(json.dumps(row) + "\n")
            bar.set_postfix({"return": episodes.average or 0.0, "policy lag": lag}, refresh=False)
            bar.update(batch.numel())
            solved = solved or episodes.reached(args.solved_at)
            if solved and not args.keep_going:
                break

    finish(args, title, model, episodes, time.monotonic() - start, solved=solved)


def figures(
    episodes: Episodes, seconds: float, lag: float, means: dict[str, float]
) -> dict[str, Any]:
    """The values of a line of metrics.jsonl."""
    return {
        "frames": episodes.frames,
        "seconds": round(seconds, 3),
        "frames_per_s": round(episodes.frames / seconds, 1),
        "episodes": len(episodes.finished),
        "return": episodes.average,
        "policy_lag": lag,
        **means,
    }


def finish(
    args: argparse.Namespace,
    title: str,
    model: nn.Module,
    episodes: Episodes,
    seconds: float,
    *,
    solved: bool,
) -> None:
    """Save and print the results; exits with 1 if the task had to be solved and isn't."""
    torch.save(model.state_dict(), args.out / "policy.pt")
    label = f"average of {WINDOW} episodes"
    path = args.out / "learning_curve.png"
    plot(path, title, label, episodes.averages, target=args.solved_at, episodes=episodes.finished)
    print(
        f"{'solved' if solved else 'not solved'}: average return {episodes.average or 0:.1f} over "
        f"{len(episodes.latest)} episodes after {episodes.frames:,} frames and {seconds:.0f} s; "
        f"metrics.jsonl, learning_curve.png and policy.pt are in {args.out}/"
    )
    if args.require_solved and not solved:
        sys.exit(1)


def parser(
    description: str | None,
    *,
    split: str = "all workers' envs",
    measure: str = f"average return over {WINDOW} episodes",
) -> argparse.ArgumentParser:
    """The command line of this and the other examples, which set other defaults.

    Args:
        description: description of the script.
        split: what --frames-per-batch must be a multiple of.
        measure: the measure that decides whether the task is solved.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add(
        "--total-frames",
        type=positive,
        default=500_000,
        help="the most frames to collect (%(default)s)",
    )
    add(
        "--frames-per-batch",
        type=positive,
        default=960,
        help=f"a multiple of {split} (%(default)s)",
    )
    add(
        "--num-workers",
        type=positive,
        default=dc.num_workers(default=2),
        help="default: all that the launch has, or 2 without a launcher",
    )
    add("--envs-per-worker", type=positive, default=4, help="%(default)s")
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="save there, also when the job is told to end; started again, the script continues",
    )
    add("--out", type=Path, default=Path("runs/ppo_cartpole"), help="a folder (%(default)s)")
    add(
        "--solved-at",
        type=float,
        default=475.0,
        help=f"{measure} at which to stop (%(default)s)",
    )
    add("--keep-going", action="store_true", help="don't stop when that is reached")
    add("--require-solved", action="store_true", help="exit with 1 if that isn't reached")
    return parser


def positive(text: str) -> int:
    """A whole number above 0."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    dc.run(main)
