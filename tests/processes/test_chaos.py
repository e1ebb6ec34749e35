"""Short runs of ``tests/chaos/run.py``; and its checks find each kind of error."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.checks import Checker, Plan
from chaos.envs import Maker, Marking
from helpers.paths import TESTS
from tensordict import TensorDict

import distcollect as dc

SCRIPT = TESTS / "chaos" / "run.py"
PLAN = Plan(sync=False, num_workers=1, num_envs=2, num_steps=30)
# On a busy machine a round takes a minute more to begin and to end.
END_S = 300


def run(seconds: int, *arguments: str) -> None:
    duration = ("--seconds", str(seconds))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *duration, *arguments, "--workers", "2", "--every", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + END_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "all checks held; seed" in done.stdout


LENGTHS_S = [8, pytest.param(1800, marks=pytest.mark.slow)]


@pytest.mark.timeout(1800 + END_S + 20)
@pytest.mark.parametrize("seconds", LENGTHS_S)
@pytest.mark.parametrize("further", [(), ("--inference",)], ids=["workers", "servers"])
def test_processes_in_trouble(seconds: int, further: tuple[str, ...]) -> None:
    # In the short runs one round with workers of their own is in sync mode, one with servers not.
    mode = () if seconds > LENGTHS_S[0] else ("--async",) if further else ("--sync",)
    run(seconds, "--round", "8", *mode, *further)


@pytest.fixture
def batches(tmp_path: Path) -> list[TensorDict]:
    maker = Maker(tmp_path, pause_s=0.0)

    def make(context: dc.EnvContext) -> object:
        return maker(context)

    collector = dc.SyncDataCollector(
        [make, make], Marking(None), frames_per_batch=PLAN.frames_per_batch
    )
    with collector:
        return [collector.next() for _ in range(3)]


def look(batches: list[TensorDict], version: int = 0) -> list[str]:
    checker = Checker([])
    checker.begin(PLAN)
    for batch in batches:
        checker.see(batch, time.monotonic(), version, {})
    return checker.failures


def test_sound_batches_pass(batches: list[TensorDict]) -> None:
    assert look(batches) == []


def swapped(batch: TensorDict) -> None:
    batch["observation"] = batch["observation"].flip(0)


def spliced(batch: TensorDict) -> None:
    ids = batch["collector", "traj_ids"]
    ids[1] = ids[0]


def torn(batch: TensorDict) -> None:
    batch["mark"][1, 5, 1] += 1


def mislabelled(batch: TensorDict) -> None:
    batch["collector", "policy_version"][0, 3:] += 1


def forgotten_end(batch: TensorDict) -> None:
    batch["next", "done"].zero_()


def other_reward(batch: TensorDict) -> None:
    batch["next", "reward"][0, 0] += 1


@pytest.mark.parametrize(
    "breach", [swapped, spliced, torn, mislabelled, forgotten_end, other_reward]
)
def test_a_breach_is_seen(batches: list[TensorDict], breach: Callable[[TensorDict], None]) -> None:
    breach(batches[1])
    assert look(batches, version=1)


def test_what_is_delivered_twice_is_seen(batches: list[TensorDict]) -> None:
    assert any("came before" in f for f in look([*batches, batches[1]]))
