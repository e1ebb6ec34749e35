"""Envs that raise at chosen calls, and checks of the frames around a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from helpers import engines
from helpers.counting_envs import (
    CountingEnv,
    Frame,
    check_frames,
    vector_env,
)
from helpers.policies import SummingPolicy
from tensordict import TensorDict

import distcollect as dc
from distcollect.engine.build import build_engine
from distcollect.engine.engine import Engine
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.slab import Slab

N, T = 3, 6
LONG = (100,)


class Fragile(CountingEnv):
    """Raises at its n-th step or reset, counted from 1; then close() raises too."""

    def __init__(self, number: int, fails: tuple[str, int] | None, lengths: Sequence[int]) -> None:
        super().__init__(number, lengths=lengths)
        self.fails = fails
        self.calls = {"step": 0, "reset": 0}
        self.broken = False

    def _call(self, name: str) -> None:
        assert not self.broken, "it raised, so nobody may use it any more"
        self.calls[name] += 1
        if self.fails == (name, self.calls[name]):
            self.broken = True
            raise RuntimeError(f"no more {name}s")

    def reset(self, **kwargs: Any) -> Any:
        self._call("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._call("step")
        return super().step(action)

    def close(self) -> None:
        super().close()
        if self.broken:
            raise RuntimeError("broken, so it can't be closed")


@dataclass
class Maker:
    """Makes envs; ``fails`` has, for each row, the fault of the n-th env made for that row.

    An env's number is its row and ten times how many were made before it.
    """

    fails: dict[int, list[tuple[str, int] | None]] = field(default_factory=dict)
    lengths: tuple[int, ...] = LONG
    made: dict[int, list[Fragile]] = field(default_factory=dict)

    def __call__(self, context: dc.EnvContext) -> Fragile:
        return self.make(context.env_index)

    def make(self, row: int) -> Fragile:
        made = self.made.setdefault(row, [])
        script = self.fails.get(row, [])
        fails = script[len(made)] if len(made) < len(script) else None
        made.append(Fragile(row + 10 * (len(made) % 6), fails, self.lengths))
        return made[-1]


@dataclass
class VectorMaker:
    """Like :class:`Maker`, for vector envs of any kind."""

    kind: str
    inner: Maker
    made: list[Any] = field(default_factory=list)

    def __call__(self) -> Any:
        envs = [self.inner.make(row) for row in range(N)]
        self.made.append(vector_env(self.kind, [lambda env=env: env for env in envs]))
        return self.made[-1]


def engine_of(maker: Any, policy: Any = None, *, faults: int = 3, **options: Any) -> Engine:
    plan = WorkerPlan(maker, N, policy, **options, max_env_faults=faults)
    return build_engine(plan, traj_ids=count())


def collect(engine: Engine, rollouts: int, steps: int = T, **kwargs: Any) -> TensorDict:
    """Collect some rollouts and concatenate them: ``[n, rollouts * steps]``."""
    slab = Slab(engine.layout, steps)
    parts = [engines.collect(engine, steps, slab, **kwargs) for _ in range(rollouts)]
    return torch.cat(parts, 1)


def collect_checked(
    engine: Engine, rollouts: int, lengths: Sequence[int] = LONG, cut_after: int | None = None
) -> TensorDict:
    """Collect the first rollouts, and check that every value is right and every frame there."""
    batch = collect(engine, rollouts)
    check_policy(batch)
    for row in batch:
        check_row(row, lengths, cut_after)
    assert is_accounted_for(engine, batch.numel())
    return batch


def is_accounted_for(engine: Engine, delivered: int) -> bool:
    held = engine.num_waiting
    return engine.counter.stepped == delivered + sum(engine.counter.lost.values()) + held


def check_row(row: TensorDict, lengths: Sequence[int] = LONG, cut_after: int | None = None) -> None:
    """Check every value of a row's frames, trajectory by trajectory."""
    ids = row["collector", "traj_ids"]
    runs, sizes = torch.unique_consecutive(ids, return_counts=True)
    assert len(runs.unique()) == len(runs)
    for part in row.split(sizes.tolist()):
        over, faulted = part["next", "done"].flatten(), part["collector", "faulted"]
        assert not over[:-1].any()
        assert not (faulted & ~over).any()
        frames = [
            Frame(
                {("observation",): part["observation"][t].numpy()},
                {("action",): part["action"][t].numpy()},
                part["next", "reward"][t],
                {("observation",): part["next", "observation"][t].numpy()},
                part["next", "terminated"][t],
                part["next", "truncated"][t] and not faulted[t],
            )
            for t in range(len(part))
        ]
        check_frames(frames, lengths=lengths, cut_after=cut_after)


def check_policy(batch: TensorDict) -> None:
    """Each action was chosen for the observation in the same frame."""
    assert torch.equal(batch["sum"], batch["observation"].sum(-1))
    assert torch.equal(batch["action"], batch["sum"].long() % 5)


def same(one: TensorDict, other: TensorDict) -> bool:
    return bool((one.exclude("collector") == other.exclude("collector")).all())


def steps_of(row: TensorDict) -> list[tuple[int, int, int]]:
    """(env number, episode, step) of each frame's observation."""
    return [tuple(map(int, frame[:3])) for frame in row["observation"]]


# How AsyncVectorEnv logs errors.
quiet = pytest.mark.filterwarnings("ignore:.*(ERROR|WARN):UserWarning")


def check_a_vector_env_that_raises(kind: str, at: int) -> None:
    maker = VectorMaker(kind, Maker({1: [("step", at)]}))
    engine = engine_of(maker, SummingPolicy())
    batch = collect_checked(engine, 3)
    before = at - 1
    for row, each in enumerate(batch):
        expected = [(row, 0, step) for step in range(before)]
        expected += [(row + 10, 0, step) for step in range(3 * T - before)]
        assert steps_of(each) == expected
    marked = [] if before in (0, T) else [[row, before - 1] for row in range(N)]
    assert batch["collector", "faulted"].nonzero().tolist() == marked
    assert engine.counter.env_faults == 1
    assert not engine.counter.lost
    engine.close()
    if kind.startswith("async"):
        assert not any(process.is_alive() for env in maker.made for process in env.processes)
    if kind.startswith("sync"):
        assert all(env.closed for made in maker.inner.made.values() for env in made)


def check_rows_of_a_vector_env_with_episodes_of_their_own(kind: str, at: int) -> None:
    """Rows whose episode just ended are not marked, and no trajectory spans the fault."""
    lengths = (3, 1, 4, 2)
    maker = VectorMaker(kind, Maker({1: [("step", at), ("step", 9), ("step", 2)]}, lengths))
    engine = engine_of(maker, SummingPolicy())
    batch = collect_checked(engine, 5, lengths)
    for each in batch:
        begins = torch.cat([torch.tensor([True]), each["collector", "traj_ids"].diff() != 0])
        assert not each["observation"][begins, 2].any(), "a trajectory's first frame is missing"
    assert batch["collector", "faulted"].any()
    assert engine.counter.env_faults == 3
    engine.close()
