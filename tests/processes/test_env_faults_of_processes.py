"""Envs that raise or die in processes of their own, and in workers."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import socket
import threading
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv
from helpers.bad_calls import OldEnv
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
    VectorMaker,
    check_a_vector_env_that_raises,
    check_row,
    check_rows_of_a_vector_env_with_episodes_of_their_own,
    collect,
    collect_checked,
    engine_of,
    quiet,
    steps_of,
)
from helpers.policies import SummingPolicy

import distcollect as dc

ASYNC_KINDS = ["async-next", "async-disabled", "async-next-pipe"]


@quiet
@pytest.mark.parametrize("kind", ASYNC_KINDS)
@pytest.mark.parametrize("at", [3, T + 1])
def test_a_vector_env_that_raises(kind: str, at: int) -> None:
    check_a_vector_env_that_raises(kind, at)


@quiet
@pytest.mark.parametrize("kind", ASYNC_KINDS)
def test_rows_of_a_vector_env_with_episodes_of_their_own(kind: str) -> None:
    check_rows_of_a_vector_env_with_episodes_of_their_own(kind, 3)


@quiet
def test_a_vector_env_whose_process_is_killed() -> None:
    maker = VectorMaker("async-next", Maker())
    engine = engine_of(maker, SummingPolicy())
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
    """Ends its process instead of raising."""

    def step(self, action: Any) -> Any:
        self.calls["step"] += 1
        if self.fails == ("step", self.calls["step"]):
            os._exit(1)
        return CountingEnv.step(self, action)


@quiet
@pytest.mark.parametrize("dying", range(N))
def test_a_vector_env_whose_process_ends_in_mid_step(dying: int) -> None:
    """Some envs have answered by then and others not; nothing waits for answers that can't come."""
    made: list[AsyncVectorEnv] = []

    def make() -> AsyncVectorEnv:
        fails = None if made else ("step", 3)
        envs = [Dies(row, fails if row == dying else None, LONG) for row in range(N)]
        made.append(AsyncVectorEnv([lambda env=env: env for env in envs]))
        return made[-1]

    engine = engine_of(make, SummingPolicy(), faults=1)
    batch = collect_checked(engine, 1)
    assert batch["collector", "faulted"].nonzero().tolist() == [[row, 1] for row in range(N)]
    processes = made[0].processes
    assert not any(process.is_alive() for process in processes)
    made.pop(0)
    gc.collect()  # an error in its destructor would show
    engine.close()


class HangsAtItsEnd(CountingEnv):
    def close(self) -> None:
        if multiprocessing.parent_process() is not None:
            threading.Event().wait()


def test_a_vector_env_whose_processes_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcollect.envs.closing._CLOSE_TIMEOUT_S", 0.2)
    made = AsyncVectorEnv([lambda row=row: HangsAtItsEnd(row) for row in range(N)])
    collect(engine := engine_of(lambda: made, SummingPolicy()), 1)
    engine.close()
    assert not any(process.is_alive() for process in made.processes)


class StumblesOnce:
    """Env 1 of worker 1 raises at its 20th step; the env that replaces it works."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, context: dc.EnvContext) -> StumblingEnv:
        stumbles = (context.worker_id, context.env_index) == (1, 1)
        self.made += stumbles
        return StumblingEnv(gym.make("CartPole-v1"), 20 if self.made == 1 and stumbles else None)


def test_a_worker_says_which_env_it_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    with dc.RPCDataCollector(
        StumblesOnce(),
        lambda observation: (observation[:, 2] > 0).long(),  # keeps the pole up for longer
        frames_per_batch=4 * 60,
        num_workers=2,
        envs_per_worker=2,
        sync=True,
    ) as collector:
        collector.set_seed(0)
        batch = collector.next(timeout_s=60)
    marked = batch["collector", "faulted"]
    assert batch["collector", "worker_id"][marked].tolist() == [1]
    assert batch["next", "truncated"][marked].all()
    said = rf"^20.* worker 1 on {socket.gethostname()}: env 1 \(CartPole-v1\): step\(\) raised"
    assert re.search(said, capfd.readouterr().err, re.MULTILINE)


def test_a_step_of_the_old_gym_ends_the_run_with_its_first_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="distcollect"),
        dc.MultiaSyncDataCollector(OldEnv, frames_per_batch=8, num_workers=2) as collector,
        pytest.raises(dc.EnvError, match=r"returned 4 values.*old gym package\? \(step 1\)$"),
    ):
        collector.next()
    assert not [each for each in caplog.messages if "replaced" in each]


def broken_in(processes: int) -> Any:
    """Makes an env that raises at its second step in this many processes of a worker."""

    def make(context: dc.EnvContext) -> StumblingEnv:
        return StumblingEnv(gym.make("CartPole-v1"), 2 if context.incarnation < processes else None)

    return make


def test_the_only_worker_is_replaced_if_its_env_is_broken() -> None:
    faults = dc.Faults(max_env_faults=1)
    with dc.aSyncDataCollector(broken_in(1), frames_per_batch=40, faults=faults) as collector:
        collector.next(timeout_s=60)
        assert collector.stats().num_restarts == 1


@pytest.mark.parametrize("inference", [None, dc.Inference("host")], ids=["worker", "host"])
def test_an_env_that_is_broken_in_each_process_ends_the_run(
    inference: dc.Inference | None,
) -> None:
    with dc.MultiSyncDataCollector(
        broken_in(99),
        SummingPolicy(),
        frames_per_batch=40,
        num_workers=1,
        inference=inference,
        faults=dc.Faults(max_env_faults=1),
    ) as collector:
        with pytest.raises(dc.EnvError, match="stumbled"):
            collector.next(timeout_s=60)
        assert collector.stats().num_restarts == 2


class RaisesInClose(CountingEnv):
    def close(self) -> None:
        raise RuntimeError("can't be closed")


def test_what_an_env_raises_in_close_is_printed_by_its_worker(
    capfd: pytest.CaptureFixture[str],
) -> None:
    collector = dc.MultiSyncDataCollector(RaisesInClose, frames_per_batch=4, num_workers=1)
    with collector:
        collector.next()
    printed = capfd.readouterr().err
    assert "worker 0" in printed
    assert "close() raised RuntimeError: can't be closed\nTraceback" in printed
    assert "distcollect/" not in printed
    assert collector.ledger.total.lost.keys() <= {"shut_down"}
