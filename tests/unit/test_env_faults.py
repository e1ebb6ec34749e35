"""Envs that raise are replaced; only their own trajectories show it."""

from __future__ import annotations

import logging
import threading
import time
from itertools import count
from typing import Any

import gymnasium as gym
import pytest
import torch
from helpers.counting_envs import (
    CountingEnv,
)
from helpers.envs import StumblingEnv
from helpers.fragile_envs import (
    LONG,
    Fragile,
    Maker,
    N,
    T,
    collect,
    collect_checked,
    engine_of,
    is_accounted_for,
    same,
    steps_of,
)
from helpers.policies import SummingPolicy
from tensordict import TensorDict

import distcollect as dc
from distcollect.config import Faults
from distcollect.engine.build import build_engine
from distcollect.engine.interrupts import Stopped
from distcollect.engine.plan import WorkerPlan


@pytest.mark.parametrize("at", range(1, 2 * T + 1))
@pytest.mark.parametrize("row", range(N))
def test_a_step_that_raises(row: int, at: int) -> None:
    """At any step, in any row: only the trajectory of that row ends, with the frame before."""
    maker = Maker({row: [("step", at)]})
    engine = engine_of(maker, SummingPolicy())
    batch = collect_checked(engine, 2)
    usual = collect(engine_of(Maker(), SummingPolicy()), 2)
    for other in set(range(N)) - {row}:
        assert same(batch[other], usual[other])
    before = at - 1  # frames of the env that raised
    expected = [(row, 0, step) for step in range(before)]
    expected += [(row + 10, 0, step) for step in range(2 * T - before)]
    assert steps_of(batch[row]) == expected
    # A frame that was delivered before can't be marked any more.
    marked = [] if before in (0, T) else [before - 1]
    assert batch["collector", "faulted"][row].nonzero().flatten().tolist() == marked
    assert torch.equal(batch["next", "truncated"][..., 0], batch["collector", "faulted"])
    assert torch.equal(batch["next", "done"], batch["next", "truncated"])
    assert batch["collector", "faulted"].sum() == len(marked)
    ids = batch["collector", "traj_ids"]
    changes = (ids.diff(dim=1) != 0).nonzero().tolist()
    assert changes == ([[row, before - 1]] if before else [])
    assert engine.counter.env_faults == 1
    assert not engine.counter.lost
    assert maker.made[row][0].closed


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("lengths", [(3,), (1,), (T,)])
def test_a_reset_that_raises(lengths: tuple[int, ...], at: int) -> None:
    """The episode before the fault is whole, so nothing is marked."""
    engine = engine_of(Maker({1: [("reset", at)]}, lengths), SummingPolicy())
    batch = collect_checked(engine, 4, lengths)
    usual = collect(engine_of(Maker({}, lengths), SummingPolicy()), 4)
    assert not batch["collector", "faulted"].any()
    assert same(batch[[0, 2]], usual[[0, 2]])
    assert (batch[1]["next", "done"] == usual[1]["next", "done"]).all()
    assert steps_of(batch[1])[(at - 1) * lengths[0]] == (11, 0, 0)


@pytest.mark.parametrize("at", [1, 3])
def test_again_at_once_and_several_rows_in_one_step(at: int) -> None:
    maker = Maker({0: [("step", at)], 2: [("step", at), ("reset", 1), ("step", 1)]})
    engine = engine_of(maker, SummingPolicy())
    batch = collect_checked(engine, 2)
    assert steps_of(batch[0])[at - 1 :] == [(10, 0, step) for step in range(2 * T - at + 1)]
    assert steps_of(batch[2])[at - 1 :] == [(32, 0, step) for step in range(2 * T - at + 1)]
    assert batch["collector", "faulted"].sum() == (2 if at > 1 else 0)
    assert engine.counter.env_faults == 4


@pytest.mark.parametrize("at", range(1, 6))
def test_cut_trajectories_start_their_count_with_the_new_env(at: int) -> None:
    engine = engine_of(Maker({1: [("step", at)]}), SummingPolicy(), max_frames_per_traj=2)
    batch = collect_checked(engine, 2, cut_after=2)
    whole, rest = divmod(at - 1, 2)
    ends = [step % 2 == 1 for step in range(2 * whole)] + [True] * rest
    ends += [step % 2 == 1 for step in range(2 * T - len(ends))]
    assert batch["next", "done"][1].flatten().tolist() == ends
    assert batch["collector", "faulted"].sum() == rest


@pytest.mark.parametrize("faults", [0, 1, 2])
@pytest.mark.parametrize("row", [0, 2])
def test_an_env_that_goes_on_raising_is_given_up(faults: int, row: int) -> None:
    maker = Maker({row: [("step", T + 3), *[("step", 1)] * 9]})
    engine = engine_of(maker, faults=faults)
    delivered = collect(engine, 1).numel()
    anew = rf" \(it was replaced {faults} times? in a row\)$" if faults else "$"
    told = rf"env {row} \(Fragile\): step\(\) raised RuntimeError: no more steps{anew}"
    with pytest.raises(dc.EnvError, match=told) as caught:
        collect(engine, 1)
    assert type(caught.value) is dc.EnvError
    assert len(maker.made[row]) == faults + 1
    assert engine.counter.env_faults == faults + 1
    # The others made their transition in the step that failed.
    assert engine.counter.lost == {"env_failed": 2 * N + N - 1}
    assert is_accounted_for(engine, delivered)


def _no_licence() -> Any:
    raise OSError("no licence")


@pytest.mark.parametrize(
    ("again", "told"),
    [
        (_no_licence, r"OSError: no licence \(it was replaced 2 times"),
        (lambda: CountingEnv(action="box"), "made a second time, it has other spaces than before"),
        (None, r"raised RuntimeError: no more steps$"),
    ],
    ids=["its maker raises", "is another one", "was given as an instance"],
)
def test_an_env_that_cannot_be_made_anew(again: Any, told: str) -> None:
    first = Fragile(0, ("step", 3), LONG)
    made = count()

    def make() -> Any:
        return again() if next(made) else first

    given: Any = [first] if again is None else make
    engine = build_engine(WorkerPlan(given, 1, max_env_faults=2), traj_ids=count())
    with pytest.raises(dc.EnvError, match=told):
        collect(engine, 1)
    engine.close()  # no env is closed twice


@pytest.mark.parametrize(("fails", "length"), [(("reset", 2), 3), (("step", 2), 1)])
def test_an_episode_in_the_very_step_of_a_fault_counts(fails: tuple[str, int], length: int) -> None:
    """It ended just before the fault, or ends with the new env's first step."""
    engine = engine_of(Maker({1: [fails] * 9}, (length,)), faults=1)
    collect(engine, 1)
    assert engine.counter.env_faults > 1


@pytest.mark.parametrize(
    ("at", "length", "goes_on"),
    [(4, 3, True), (4, 5, False), (1001, 5000, True), (999, 5000, False)],
)
def test_whole_episodes_and_many_frames_start_the_count_anew(
    at: int, length: int, goes_on: bool
) -> None:
    engine = engine_of(Maker({1: [("step", at)] * 9}, (length,)), faults=1)
    steps = 3 * at
    if goes_on:
        collect(engine, 1, steps)
        assert engine.counter.env_faults > 1
    else:
        with pytest.raises(dc.EnvError, match="replaced 1 time "):
            collect(engine, 1, steps)


def test_a_trial_that_raises_is_told_at_once() -> None:
    maker = Maker({1: [("reset", 1)]})
    with pytest.raises(dc.EnvError, match=r"no more resets$") as caught:
        engine_of(maker)
    assert type(caught.value) is dc.EnvError
    assert len(maker.made[1]) == 1
    assert all(env.closed for made in maker.made.values() for env in made)


def test_it_waits_longer_each_time_and_stop_ends_that() -> None:
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


def test_of_many_faults_only_the_first_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    faults = [("step", 2)] * 3
    with caplog.at_level(logging.WARNING, logger="distcollect"):
        collect(engine_of(Maker(dict.fromkeys(range(3), faults))), 1)
    assert len(caplog.records) == 5


def test_a_reset_of_all_rows_that_raises() -> None:
    maker = Maker({1: [("reset", 2)], 2: [("reset", 2), ("reset", 1)]})
    engine = engine_of(maker, SummingPolicy(), reset_at_each_iter=True)
    batch = collect(engine, 2)
    assert [steps_of(row)[0] for row in batch] == [(0, 1, 0), (11, 0, 0), (22, 0, 0)]
    assert not batch["collector", "faulted"].any()
    assert engine.counter.env_faults == 3


def stumbling(context: dc.EnvContext) -> StumblingEnv:
    """The second env of each worker raises after 5 steps; each env that replaces it after 35."""
    if context.env_index != 1:
        return StumblingEnv(gym.make("CartPole-v1"), None)
    first = not _stumbled
    _stumbled.append(True)
    return StumblingEnv(gym.make("CartPole-v1"), 5 if first else 35)


_stumbled: list[bool] = []


@pytest.mark.parametrize("policy", [None, SummingPolicy()])
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
