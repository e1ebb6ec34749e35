"""The benchmark: its processes, and a very short run of all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import benchmarks
import pytest
from benchmarks.__main__ import main
from benchmarks.items import ITEMS, Item, Part
from benchmarks.report import table
from benchmarks.runner import Outcome, run_item
from helpers.marked import Marked


def run(item: Item, *parts: Part) -> dict[str, Outcome]:
    return run_item(item, parts, repeats=2, seconds=0.01, progress=lambda _: None)


def test_a_peer_that_is_missing_or_fails_stops_nothing() -> None:
    item = ITEMS["cartpole-1"]
    missing = Part("sync", "a peer", lambda _: {}, needs=("no_such_module",))
    failing = Part("no-such-part", "another", lambda _: {})
    hanging = Part("bare", "a third", lambda _: {}, limit_s=0.1)
    outcomes = run(item, missing, failing, hanging)
    assert [o.status for o in outcomes.values()] == ["not installed", "failed", "failed"]
    assert outcomes["sync"].reason == "no_such_module"
    assert "StopIteration" in outcomes["no-such-part"].reason
    assert "no result within 0.2 s" in outcomes["bare"].reason
    assert outcomes["bare"].values == [None, None]
    assert "not installed: no_such_module" in table(item, {"sync": outcomes["sync"]})


def test_quick_run(tmp_path: Path, marked: Marked, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--quick", "--json", str(files[0]), "--png", str(files[1])]
    chosen = ["--contender", "bare", "--contender", "async"]
    assert main([*arguments, *chosen]) == 0
    report = json.loads(files[0].read_text())
    [values] = report["items"]["cartpole-16"]["async"]["values"]
    assert values["frames_per_s"] > 0
    ratios = {target["what"]: target["ratio"] for target in report["targets"]}
    assert ratios["async / bare, cartpole-16"]["count"] == 1
    assert files[1].read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "distcollect.aSyncDataCollector" in shown
    assert "async / bare, cartpole-16" in shown
    assert marked.gone(), marked.left()


def test_nothing_is_left_when_the_benchmark_is_killed(marked: Marked) -> None:
    arguments = ["--workload", "cartpole-1", "--contender", "rpc-async-x2"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *arguments, "--seconds", "60"],
        env={**os.environ, "PYTHONPATH": str(Path(benchmarks.__file__).parents[1])},
        stdout=subprocess.DEVNULL,
    )
    # The benchmark, the trainer, its guard and two workers.
    deadline = time.monotonic() + 60
    while len(marked.pids()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    bench.kill()
    bench.wait(10)
    assert marked.gone(), marked.left()


def test_importing_the_package_imports_no_benchmark() -> None:
    code = (
        "import sys, distcollect.commands.main\n"
        "unwanted = 'benchmarks', 'torchrl', 'stable_baselines3'\n"
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert out.stdout.strip() == b"[]"
