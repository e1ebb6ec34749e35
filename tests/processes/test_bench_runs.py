"""``distcollect bench`` and tests/benchmarks, with very short windows."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from benchmarks.__main__ import main as compare
from helpers.marked import Marked
from helpers.waiting import eventually

from distcollect.commands.main import main


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:
    """Start multiprocessing's tracker, which stays: so it has no mark."""
    resource_tracker.ensure_running()


QUICK = ("bench", "--env=CartPole-v1", "--envs=2", "--seconds=0.05", "--pairs=2")


def test_bench(tmp_path: Path, marked: Marked, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    policy = "--policy=helpers.policies:CategoricalPolicy"
    assert main([*QUICK, policy, "--workers=0,2", f"--json={file}"]) == 0
    in_process, two = json.loads(file.read_text())["sizes"]
    assert [in_process["workers"], two["workers"]] == [0, 2]
    for size in (in_process, two):
        assert len(size["ratios"]) == 2
        assert min(size["bare"], size["collector"], *size["ratios"]) > 0
        assert size["bound"] in ("env", "policy", "network", "trainer", "weights")
    shown = capsys.readouterr().out
    assert "in process" in shown
    assert "2 worker(s), 2 env(s): Bound by" in shown
    assert "weights were published" not in shown  # nobody could
    assert marked.gone(), marked.left()


def test_nothing_is_left_when_bench_is_killed(marked: Marked) -> None:
    command = [sys.executable, "-m", "distcollect", *QUICK, "--workers=2", "--pairs=9999"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # The benchmark, two bare loops, multiprocessing's tracker, a guard, what forks workers, and
    # two of these.
    eventually(lambda: len(marked.pids()) >= 7 or bench.poll() is not None, 120, about=marked.left)
    assert bench.poll() is None
    bench.kill()
    bench.wait(10)
    assert marked.gone(60), marked.left()


@pytest.mark.slow
def test_a_comparison(tmp_path: Path, marked: Marked, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compared.json"
    chosen = ["--workload=cartpole-16", "--part=bare", "--part=async"]
    assert compare([*chosen, "--seconds=0.3", "--repeats=1", f"--json={file}"]) == 0
    [values] = json.loads(file.read_text())["items"]["cartpole-16"]["async"]["values"]
    assert values["frames_per_s"] > 0
    assert "aSyncDataCollector" in capsys.readouterr().out
    assert marked.gone(), marked.left()
