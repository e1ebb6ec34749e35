"""Envs that raise are made anew; nothing but their own trajectories shows it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from helpers.counting import (
    CountingEnv,
    CountingVectorEnv,
    Facts,
    Frame,
    check_frames,
    echo_of,
    reward_of,
)
from helpers.loopback_pool import LoopbackWorkers
from tensordict import TensorDict
from torch import nn

import distcollect as dc
from distcollect.config import Faults
from distcollect.engine import env_recovery
from distcollect.engine.build import build_engine
from distcollect.engine.engine import Engine, Stopped
from distcollect.engine.plan import StepOptions, WorkerPlan
from distcollect.envs.base import Faulted
from distcollect.envs.make import make_envs
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.slab import Slab
from distcollect.transport.protocol import CollectRequest

N, T = 3, 6
LONG = (100,)


class Fragile(CountingEnv):
    """Raises at its n-th step or reset, counted from 1, and when it is closed after that."""

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
    """Makes the envs of some rows as ``fails`` has it: for each row, of the n-th env made for it.

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
    """As :class:`Maker`, of vector envs of any kind."""

    kind: str
    inner: Maker
    made: list[Any] = field(default_factory=list)

    def __call__(self) -> Any:
        how, mode, *rest = self.kind.split("-")
        autoreset = {
            "next": AutoresetMode.NEXT_STEP,
            "same": AutoresetMode.SAME_STEP,
            "disabled": AutoresetMode.DISABLED,
        }[mode]
        if how == "native":
            envs = [self.inner.make(row) for row in range(N)]
            self.made.append(CountingVectorEnv(envs, autoreset))
            return self.made[-1]
        envs = [self.inner.make(row) for row in range(N)]
        makers = [lambda env=env: env for env in envs]
        if how == "sync":
            self.made.append(SyncVectorEnv(makers, autoreset_mode=autoreset))
        else:
            shared = "pipe" not in rest
            self.made.append(AsyncVectorEnv(makers, shared, autoreset_mode=autoreset))
        return self.made[-1]


class Summing(nn.Module):
    """Acts by what it sees, and says what that was."""

    def forward(self, observation: torch.Tensor) -> Any:
        total = observation.sum(-1)
        return total.long() % 5, {"sum": total}


def engine_of(maker: Any, policy: Any = None, *, faults: int = 3, **options: Any) -> Engine:
    plan = WorkerPlan(maker, N, policy, options=StepOptions(**options), max_env_faults=faults)
    return build_engine(plan, traj_ids=count())


def collect(engine: Engine, rollouts: int, steps: int = T, **kwargs: Any) -> TensorDict:
    """Some rollouts, one behind the other, ``[n, rollouts * steps]``."""
    slab = Slab(engine.layout, steps)
    parts = []
    for _ in range(rollouts):
        engine.collect(slab, **kwargs)
        tensors = [tensor.clone() for tensor in slab.tensors()]
        header = Header(0, 0, 0, slab.num_frames, slab.num_steps, 0, (0, 0))
        parts.append(assemble(engine.layout, [Rollout(header, tensors)]))
    return torch.cat(parts, 1)


def is_accounted_for(engine: Engine, delivered: int) -> bool:
    held = int(engine._loop.surplus.sum())
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
    """Each action was chosen for the observation that stands beside it."""
    assert torch.equal(batch["sum"], batch["observation"].sum(-1))
    assert torch.equal(batch["action"], batch["sum"].long() % 5)


def same(one: TensorDict, other: TensorDict) -> bool:
    return bool((one.exclude("collector") == other.exclude("collector")).all())


def steps_of(row: TensorDict) -> list[tuple[int, int, int]]:
    """(number, episode, step) that each frame starts with."""
    return [tuple(map(int, frame[:3])) for frame in row["observation"]]


@pytest.mark.parametrize("at", range(1, 2 * T + 1))
@pytest.mark.parametrize("row", range(N))
def test_a_step_that_raises(row: int, at: int) -> None:
    """Wherever in a rollout, in whichever row: only its own trajectory ends, one frame before."""
    maker = Maker({row: [("step", at)]})
    engine = engine_of(maker, Summing())
    batch = collect(engine, 2)
    usual = collect(engine_of(Maker(), Summing()), 2)
    check_policy(batch)
    for other in set(range(N)) - {row}:
        assert same(batch[other], usual[other])
    for each in batch:
        check_row(each)
    before = at - 1  # frames of the env that raised
    expected = [(row, 0, step) for step in range(before)]
    expected += [(row + 10, 0, step) for step in range(2 * T - before)]
    assert steps_of(batch[row]) == expected
    # What was delivered before can't be marked any more.
    marked = [] if before in (0, T) else [before - 1]
    assert batch["collector", "faulted"][row].nonzero().flatten().tolist() == marked
    assert torch.equal(batch["next", "truncated"][..., 0], batch["collector", "faulted"])
    assert torch.equal(batch["next", "done"], batch["next", "truncated"])
    assert batch["collector", "faulted"].sum() == len(marked)
    ids = batch["collector", "traj_ids"]
    changes = (ids.diff(dim=1) != 0).nonzero().tolist()
    assert changes == ([[row, before - 1]] if before else [])
    assert engine.counter.env_faults == 1
    assert is_accounted_for(engine, batch.numel())
    assert not engine.counter.lost
    assert maker.made[row][0].closed


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("lengths", [(3,), (1,), (T,)])
def test_a_reset_that_raises(lengths: tuple[int, ...], at: int) -> None:
    """The episode before it is whole, so nothing is marked."""
    engine = engine_of(Maker({1: [("reset", at)]}, lengths), Summing())
    batch = collect(engine, 4)
    usual = collect(engine_of(Maker({}, lengths), Summing()), 4)
    for each in batch:
        check_row(each, lengths)
    check_policy(batch)
    assert not batch["collector", "faulted"].any()
    assert same(batch[[0, 2]], usual[[0, 2]])
    assert (batch[1]["next", "done"] == usual[1]["next", "done"]).all()
    assert steps_of(batch[1])[(at - 1) * lengths[0]] == (11, 0, 0)
    assert is_accounted_for(engine, batch.numel())


@pytest.mark.parametrize("at", [1, 3])
def test_again_at_once_and_several_rows_in_one_step(at: int) -> None:
    maker = Maker({0: [("step", at)], 2: [("step", at), ("reset", 1), ("step", 1)]})
    engine = engine_of(maker, Summing())
    batch = collect(engine, 2)
    for each in batch:
        check_row(each)
    check_policy(batch)
    assert steps_of(batch[0])[at - 1 :] == [(10, 0, step) for step in range(2 * T - at + 1)]
    assert steps_of(batch[2])[at - 1 :] == [(32, 0, step) for step in range(2 * T - at + 1)]
    assert batch["collector", "faulted"].sum() == (2 if at > 1 else 0)
    assert engine.counter.env_faults == 4
    assert is_accounted_for(engine, batch.numel())


def test_an_episode_that_ends_with_the_first_step_after_a_fault() -> None:
    lengths = (1,)
    engine = engine_of(Maker({1: [("step", 3)]}, lengths), Summing())
    batch = collect(engine, 2)
    for each in batch:
        check_row(each, lengths)
    assert (batch["next", "done"]).all()
    assert not batch["collector", "faulted"].any()


@pytest.mark.parametrize("at", range(1, 6))
def test_cut_trajectories_start_their_count_with_the_new_env(at: int) -> None:
    engine = engine_of(Maker({1: [("step", at)]}), Summing(), max_frames_per_traj=2)
    batch = collect(engine, 2)
    for each in batch:
        check_row(each, cut_after=2)
    whole, rest = divmod(at - 1, 2)
    ends = [step % 2 == 1 for step in range(2 * whole)] + [True] * rest
    ends += [step % 2 == 1 for step in range(2 * T - len(ends))]
    assert batch["next", "done"][1].flatten().tolist() == ends
    assert batch["collector", "faulted"].sum() == rest


class InPlace(nn.Module):
    """Uses its input as scratch paper."""

    def forward(self, observation: torch.Tensor) -> Any:
        total = observation.sum(-1)
        observation.fill_(-1)
        return total.long() % 5, {"sum": total}


def test_a_policy_that_changes_its_input() -> None:
    batch = collect(engine_of(Maker({1: [("step", 4)]}), InPlace()), 2)
    check_policy(batch)
    for each in batch:
        check_row(each)


class SeesWrong(Fragile):
    """Its observation stops fitting its space."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs[:3] if self.calls["step"] == 4 and self.facts.number == 0 else obs, *rest


def test_an_observation_that_stops_fitting() -> None:
    made: list[SeesWrong] = []

    def make() -> SeesWrong:
        made.append(SeesWrong(10 * len(made), None, LONG))
        return made[-1]

    engine = build_engine(WorkerPlan(make, 1, max_env_faults=1), traj_ids=count())
    batch = collect(engine, 1)
    check_row(batch[0])
    assert batch["collector", "faulted"].tolist() == [[False, False, True, False, False, False]]
    assert made[0].closed


# When it doesn't help.


@pytest.mark.parametrize("faults", [0, 1, 2])
@pytest.mark.parametrize("row", [0, 2])
def test_an_env_that_goes_on_raising_is_given_up(faults: int, row: int) -> None:
    maker = Maker({row: [("step", T + 3), *[("step", 1)] * 9]})
    engine = engine_of(maker, faults=faults)
    delivered = collect(engine, 1).numel()
    anew = rf" \(it was replaced {faults} times in a row\)$" if faults else "$"
    told = rf"env {row} \(Fragile\): step\(\) raised RuntimeError: no more steps{anew}"
    with pytest.raises(dc.EnvError, match=told) as caught:
        collect(engine, 1)
    assert type(caught.value) is dc.EnvError
    assert len(maker.made[row]) == faults + 1
    assert engine.counter.env_faults == faults + 1
    # The others made their transition in the step that failed.
    assert engine.counter.lost == {"env_failed": 2 * N + N - 1}
    assert is_accounted_for(engine, delivered)


def test_a_maker_that_raises_counts_as_well() -> None:
    made: list[Fragile] = []

    def make() -> Fragile:
        if made:
            raise OSError("no licence")
        made.append(Fragile(0, ("step", 3), LONG))
        return made[-1]

    engine = build_engine(WorkerPlan(make, 1, max_env_faults=2), traj_ids=count())
    with pytest.raises(dc.EnvError, match=r"OSError: no licence \(it was replaced 2 times"):
        collect(engine, 1)
    engine.close()  # not a second time what is closed


def test_an_env_that_comes_back_as_another_one() -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        env = Fragile(0, ("step", 2), LONG)
        made.append(CountingEnv(action="box") if made else env)
        return made[-1]

    engine = build_engine(WorkerPlan(make, 1, max_env_faults=1), traj_ids=count())
    with pytest.raises(dc.EnvError, match="made a second time, it has other spaces than before"):
        collect(engine, 1)


def test_a_whole_episode_starts_the_count_anew() -> None:
    """One fault after each episode, for ever."""
    maker = Maker({1: [("step", 4)] * 20}, lengths=(3,))
    engine = engine_of(maker, faults=1)
    batch = collect(engine, 6)
    check_row(batch[1], (3,))
    assert engine.counter.env_faults == 11
    assert all(env.closed for env in maker.made[1][:-1])


@pytest.mark.parametrize(("fails", "length"), [(("reset", 2), 3), (("step", 2), 1)])
def test_an_episode_in_the_very_step_of_a_fault_counts(fails: tuple[str, int], length: int) -> None:
    """It ended just before the fault, or is over with the new env's first step."""
    engine = engine_of(Maker({1: [fails] * 9}, (length,)), faults=1)
    collect(engine, 1)
    assert engine.counter.env_faults > 1


def test_without_an_episode_the_count_goes_on() -> None:
    engine = engine_of(Maker({1: [("step", 4)] * 20}, lengths=(5,)), faults=1)
    with pytest.raises(dc.EnvError, match="replaced 1 times"):
        collect(engine, 2)


def test_many_frames_start_the_count_anew() -> None:
    engine = engine_of(Maker({1: [("step", 1001)] * 3}, lengths=(5000,)), faults=1)
    assert collect(engine, 17, 150)["collector", "faulted"].sum() == 2
    assert engine.counter.env_faults == 2
    engine = engine_of(Maker({1: [("step", 999)] * 3}, lengths=(5000,)), faults=1)
    with pytest.raises(dc.EnvError, match="replaced 1 times"):
        collect(engine, 17, 150)


def test_an_instance_cannot_be_made_anew() -> None:
    plan = WorkerPlan([Fragile(0, ("step", 3), LONG)], 1, max_env_faults=5)
    engine = build_engine(plan, traj_ids=count())
    with pytest.raises(dc.EnvError, match=r"raised RuntimeError: no more steps$"):
        collect(engine, 1)


def test_a_trial_that_raises_is_told_at_once() -> None:
    maker = Maker({1: [("reset", 1)]})
    with pytest.raises(dc.EnvError, match=r"no more resets$") as caught:
        engine_of(maker)
    assert type(caught.value) is dc.EnvError
    assert len(maker.made[1]) == 1
    assert all(env.closed for made in maker.made.values() for env in made)


def test_it_waits_longer_each_time_and_stop_ends_that() -> None:
    assert [env_recovery._delay_s(n) for n in range(1, 6)] == [0, 0.1, 0.2, 0.4, 0.8]
    assert env_recovery._delay_s(50) == 5
    waits = threading.Event()
    made: list[Fragile] = []

    def make() -> Fragile:
        made.append(Fragile(0, ("step", 1), LONG))
        if len(made) == 6:
            waits.set()  # and then for 1.6 s
        return made[-1]

    engine = build_engine(WorkerPlan(make, 1, max_env_faults=99), traj_ids=count())
    stopped_at: list[float] = []

    def stop() -> None:
        waits.wait()
        time.sleep(0.1)
        stopped_at.append(time.monotonic())
        engine.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        collect(engine, 1)
    assert time.monotonic() - stopped_at[0] < 1
    thread.join()
    assert len(made) == 6


def test_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="distcollect"):
        collect(engine_of(Maker({1: [("step", 2), ("step", 1)]})), 1)
    told = (
        "env 1 (Fragile): step() raised RuntimeError: no more steps; replaced by a new env, {} in "
        "a row"
    )
    assert [record.getMessage() for record in caplog.records] == [told.format(1), told.format(2)]


# Resets of all rows, and seeds.


def test_a_reset_of_all_rows_that_raises() -> None:
    maker = Maker({1: [("reset", 2)], 2: [("reset", 2), ("reset", 1)]})
    engine = engine_of(maker, Summing(), reset_at_each_iter=True)
    batch = collect(engine, 2)
    assert [steps_of(row)[0] for row in batch] == [(0, 1, 0), (11, 0, 0), (22, 0, 0)]
    assert not batch["collector", "faulted"].any()
    assert engine.counter.env_faults == 3


class Stumbling(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at one of its steps."""

    def __init__(self, env: Any, at: int | None) -> None:
        super().__init__(env)
        self.left = at

    def step(self, action: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("stumbled")
        return super().step(action)


def stumbling(context: dc.EnvContext) -> Stumbling:
    """Of each worker the second env, after 5 steps; each of its successors after 20."""
    if context.env_index != 1:
        return Stumbling(gym.make("CartPole-v1"), None)
    first = not _stumbled
    _stumbled.append(True)
    return Stumbling(gym.make("CartPole-v1"), 5 if first else 20)


_stumbled: list[bool] = []


@pytest.mark.parametrize("policy", [None, Summing()])
def test_a_seed_decides_about_the_new_envs_too(policy: Any) -> None:
    def collected(seed: int) -> TensorDict:
        _stumbled.clear()
        with dc.SyncDataCollector(
            stumbling,
            (lambda observation: (observation.sum(-1) > 0).long()) if policy else None,
            frames_per_batch=N * 60,
            envs_per_worker=N,
            faults=Faults(max_env_faults=9),
        ) as collector:
            collector.set_seed(seed)
            return torch.cat([collector.next() for _ in range(2)], 1)

    first, again, other = collected(3), collected(3), collected(4)
    assert first["collector", "faulted"].any()
    assert same(first, again)
    assert torch.equal(first["collector", "faulted"], again["collector", "faulted"])
    assert not same(first, other)
    ids = first["collector", "traj_ids"][1]
    starts = torch.cat([torch.tensor([True]), ids.diff() != 0])
    begun = first["observation"][1][starts]
    assert len(begun.unique(dim=0)) == len(begun), "an env began as the one before it"
    with dc.SyncDataCollector(
        "CartPole-v1",
        (lambda observation: (observation.sum(-1) > 0).long()) if policy else None,
        frames_per_batch=N * 60,
        envs_per_worker=N,
    ) as collector:
        collector.set_seed(3)
        usual = torch.cat([collector.next() for _ in range(2)], 1)
    assert same(first[[0, 2]], usual[[0, 2]])


# Vector envs: all their rows share one fate.

VECTOR_KINDS = ["sync-next", "sync-same", "async-next", "async-disabled", "async-next-pipe"]
VECTOR_KINDS += ["native-next", "native-same", "native-disabled"]
# How AsyncVectorEnv logs errors.
quiet = pytest.mark.filterwarnings("ignore:.*(ERROR|WARN):UserWarning")


@quiet
@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("at", [1, 3, T, T + 1, T + 3])
def test_a_vector_env_that_raises(kind: str, at: int) -> None:
    maker = VectorMaker(kind, Maker({1: [("step", at)]}))
    engine = engine_of(maker, Summing())
    batch = collect(engine, 3)
    check_policy(batch)
    before = at - 1
    for row, each in enumerate(batch):
        check_row(each)
        expected = [(row, 0, step) for step in range(before)]
        expected += [(row + 10, 0, step) for step in range(3 * T - before)]
        assert steps_of(each) == expected
    marked = [] if before in (0, T) else [[row, before - 1] for row in range(N)]
    assert batch["collector", "faulted"].nonzero().tolist() == marked
    assert engine.counter.env_faults == 1
    assert is_accounted_for(engine, batch.numel())
    assert not engine.counter.lost
    engine.close()
    if kind.startswith("async"):
        assert not any(process.is_alive() for env in maker.made for process in env.processes)
    if kind.startswith("sync"):
        assert all(env.closed for made in maker.inner.made.values() for env in made)


@quiet
@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("at", [2, 3, 4])
def test_rows_of_a_vector_env_with_episodes_of_their_own(kind: str, at: int) -> None:
    """Rows that have just ended are not marked, and none is spliced."""
    lengths = (3, 1, 4, 2)
    maker = VectorMaker(kind, Maker({1: [("step", at), ("step", 9), ("step", 2)]}, lengths))
    engine = engine_of(maker, Summing())
    batch = collect(engine, 5)
    check_policy(batch)
    for each in batch:
        check_row(each, lengths)
        begins = torch.cat([torch.tensor([True]), each["collector", "traj_ids"].diff() != 0])
        assert not each["observation"][begins, 2].any(), "a trajectory's first frame is missing"
    assert batch["collector", "faulted"].any()
    assert engine.counter.env_faults == 3
    assert is_accounted_for(engine, batch.numel())
    engine.close()


@pytest.mark.parametrize("kind", ["sync-next", "native-disabled"])
def test_a_reset_of_some_rows_that_raises(kind: str) -> None:
    """The other rows' last transition was real, and the fault ends their trajectories with it."""
    lengths = (3, 5, 7)  # of rows 0, 1 and 2 in their first episodes
    maker = VectorMaker(kind, Maker({0: [("reset", 2)]}, lengths))
    engine = engine_of(maker, Summing())
    batch = collect(engine, 2)
    check_policy(batch)
    for each in batch:
        check_row(each, lengths)
    assert batch["collector", "faulted"].nonzero().tolist() == [[1, 2], [2, 2]]
    assert batch["next", "done"][:, 2].all()
    assert [steps_of(row)[3] for row in batch] == [(10, 0, 0), (11, 0, 0), (12, 0, 0)]
    assert is_accounted_for(engine, batch.numel())


@quiet
@pytest.mark.parametrize("kind", ["sync-next", "native-next"])
def test_a_vector_env_that_goes_on_raising_is_given_up(kind: str) -> None:
    maker = VectorMaker(kind, Maker({1: [("step", T + 3), *[("step", 1)] * 9]}))
    engine = engine_of(maker, faults=1)
    delivered = collect(engine, 1).numel()
    with pytest.raises(dc.EnvError, match=r"vector env .*step\(\) raised .*replaced 1 times"):
        collect(engine, 1)
    assert engine.counter.lost == {"env_failed": 2 * N}
    assert is_accounted_for(engine, delivered)


UNEVEN = [(1,), (50,), (3,)]


class Uneven:
    """A native vector env whose rows drift apart, and whose first object raises at a step."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.made = 0

    def __call__(self) -> CountingVectorEnv:
        fails = ("step", self.at) if not self.made else None
        envs = [
            Fragile(row + 10 * self.made, fails if row == 1 else None, lengths)
            for row, lengths in enumerate(UNEVEN)
        ]
        self.made += 1
        return CountingVectorEnv(envs, AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("at", range(1, 40, 3))
def test_rows_that_drift_apart(at: int, fresh: bool) -> None:
    engine = engine_of(Uneven(at), Summing())
    batch = collect(engine, 10, fresh=fresh)
    check_policy(batch)
    for row, each in enumerate(batch):
        ids = each["collector", "traj_ids"]
        sizes = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
        for part in each.split(sizes):
            check_row(part, UNEVEN[row])
        places = steps_of(each)
        assert sorted(places) == places, "a frame out of place"
        assert len(set(places)) == len(places), "a frame twice"
    assert is_accounted_for(engine, batch.numel())
    assert engine.counter.env_faults == 1


@quiet
def test_a_vector_env_whose_process_is_killed() -> None:
    maker = VectorMaker("async-next", Maker())
    engine = engine_of(maker, Summing())
    collect(engine, 1)
    processes = maker.made[0].processes
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[1].join()
    batch = collect(engine, 1)
    for each in batch:
        check_row(each)
    assert steps_of(batch[0])[0] == (10, 0, 0)
    assert not any(process.is_alive() for process in processes)
    engine.close()


class Dies(Fragile):
    """Takes its process along."""

    def step(self, action: Any) -> Any:
        self.calls["step"] += 1
        if self.fails == ("step", self.calls["step"]):
            os._exit(1)
        return CountingEnv.step(self, action)


@quiet
@pytest.mark.parametrize("dying", range(N))
def test_a_vector_env_whose_process_ends_in_mid_step(dying: int) -> None:
    """Some have answered by then and some have not, and nobody waits for what never comes."""
    made: list[AsyncVectorEnv] = []

    def make() -> AsyncVectorEnv:
        fails = None if made else ("step", 3)
        envs = [Dies(row, fails if row == dying else None, LONG) for row in range(N)]
        made.append(AsyncVectorEnv([lambda env=env: env for env in envs]))
        return made[-1]

    engine = engine_of(make, Summing(), faults=1)
    batch = collect(engine, 1)
    for each in batch:
        check_row(each)
    assert batch["collector", "faulted"].nonzero().tolist() == [[row, 1] for row in range(N)]
    processes = made[0].processes
    assert not any(process.is_alive() for process in processes)
    made.pop(0)
    gc.collect()  # whatever its destructor raised would show
    engine.close()


# What a batch of envs promises whoever steps it.


def test_what_a_step_leaves_undone_is_told_and_can_be_made_up_for() -> None:
    maker = Maker({0: [("step", 1)], 2: [("reset", 2)]}, lengths=(1,))
    contexts = [dc.EnvContext(0, row, 0, None) for row in range(N)]
    envs = make_envs(maker, N, contexts=contexts)
    action = {("action",): np.arange(N)}
    envs.reset()
    with pytest.raises(Faulted, match=r"env 0 .*no more steps") as caught:
        envs.step(action)
    faulted = caught.value
    told = [(fault.rows, fault.stepped) for fault in faulted.faults]
    assert told == [((0,), False), ((2,), True)]
    assert (faulted.not_stepped, faulted.cut_short, faulted.result.ended) == ([0], [], [1, 2])
    for fault in faulted.faults:
        envs.rebuild(fault.rows, [5])
    assert [maker.made[row][-1].seeds[-1] for row in (0, 2)] == [5, 5]
    assert envs.obs["observation",][:, 0].tolist() == [10, 1, 12]
    result = envs.step(action, rows=[0])
    assert result.ended == [0, 1, 2]
    assert result.reward.tolist() == [reward_of(Facts(n, 0, 1, e)) for n, e in ECHOED]
    assert envs.final["observation",][:, 0].tolist() == [10, 1, 2]
    envs.close()


# Numbers of the envs that made the transition, and how they echo their actions.
ECHOED = [(10, echo_of([0])), (1, echo_of([1])), (2, echo_of([2]))]


# All of it.


class StumblesOnce:
    """Env 1 of worker 1 raises at its 20th step, and is all right when made anew."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, context: dc.EnvContext) -> Stumbling:
        stumbles = (context.worker_id, context.env_index) == (1, 1)
        self.made += stumbles
        return Stumbling(gym.make("CartPole-v1"), 20 if self.made == 1 and stumbles else None)


@pytest.mark.parametrize("sync", [True, False])
def test_in_worker_processes(sync: bool) -> None:
    total = 0
    with dc.RPCDataCollector(
        StumblesOnce(),
        lambda observation: (observation[:, 2] > 0).long(),  # stays up longer than that
        frames_per_batch=4 * 60 if sync else 2 * 60,
        num_workers=2,
        envs_per_worker=2,
        sync=sync,
    ) as collector:
        if sync:  # else it may be a frame from before that stumbles, and is given up
            collector.set_seed(0)
        seen: set[int] = set()
        while (not sync and seen != {0, 1}) or not total:
            batch = collector.next(timeout_s=60)
            seen |= set(batch["collector", "worker_id"].flatten().tolist())
            marked = batch["collector", "faulted"]
            total += int(marked.sum())
            assert batch["collector", "worker_id"][marked].tolist() == [1] * int(marked.sum())
            assert batch["next", "truncated"][marked].all()
    assert total == 1


def test_the_header_tells_how_often_an_env_raised() -> None:
    maker = Maker({0: [("step", 3), ("step", 2)], 1: [("step", T + 1)]})
    payload = cloudpickle.dumps(WorkerPlan(maker, N, max_env_faults=2))
    workers = LoopbackWorkers(1, Faults(), lambda worker_id: payload)
    try:
        [peer] = workers.peers.values()
        for env_faults in (2, 3, 3):
            header = workers.transport.collect(peer, CollectRequest(T)).result(30).header
            assert header.env_faults == env_faults
            assert (header.num_frames, header.num_steps) == (N * T, T)
        assert header.stepped == 3 * N * T
    finally:
        workers.close()


def test_faults_is_checked() -> None:
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(dc.ArgumentError, match="max_env_faults"):
            Faults(max_env_faults=wrong)  # type: ignore[arg-type]
    assert Faults(max_env_faults=0).max_env_faults == 0


def test_a_slab_that_is_used_again_shows_nothing_of_a_fault() -> None:
    engine = engine_of(Maker({1: [("step", 3)]}), Summing())
    slab = Slab(engine.layout, T)
    engine.collect(slab)
    assert slab.faulted.any()
    engine.collect(slab)
    assert not slab.faulted.any()
    assert not np.any(slab.truncated)
