"""The benchmark: its statistics, its processes, and a tiny run of the whole."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from helpers.scripts.marked import Marked

from distcollect.commands.bench.command import select
from distcollect.commands.bench.items import ITEMS, Item, Part
from distcollect.commands.bench.report import table, targets_table
from distcollect.commands.bench.runner import Outcome, run_item
from distcollect.commands.bench.stats import Spread, best, paired
from distcollect.commands.bench.targets import TARGETS
from distcollect.commands.bench.windows import NotEnough, frames_per_s
from distcollect.commands.main import main


def test_spread() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([None]) is None


def test_ratios_are_paired_within_a_repeat() -> None:
    # The machine got twice as slow in the second repeat: the ratio doesn't move.
    assert paired([80.0, 40.0, None, 1.0], [100.0, 50.0, 100.0, 0.0]) == [0.8, 0.8, None, None]
    assert best([1.0, None], [2.0, None]) == [2.0, None]


def test_window_counts_whole_batches_of_each_source() -> None:
    # Source 0: 10 frames each 2 s, source 1: 30 frames each 3 s. Time jumps as batches arrive.
    arrivals = sorted([(t, 0, 10) for t in range(2, 99, 2)] + [(t, 1, 30) for t in range(3, 99, 3)])
    now = 0.0

    def batches():
        nonlocal now
        for now, source, frames in arrivals:  # noqa: B007 - the clock reads it
            yield source, frames

    assert frames_per_s(batches(), 20, clock=lambda: now) == pytest.approx(10 / 2 + 30 / 3)


def test_window_excludes_the_warm_up() -> None:
    now, started = 0.0, []

    def batches():
        nonlocal now
        for number in count():
            now += 10.0 if number < 5 else 1.0
            yield 0, 7

    rate = frames_per_s(batches(), 20, clock=lambda: now, start=lambda: started.append(now))
    assert started == [30.0]
    assert rate < 7.0
    with pytest.raises(NotEnough):
        frames_per_s(iter([(0, 1)] * 5), 1.0)


def outcome(*rates: float) -> Outcome:
    return Outcome([{"frames_per_s": rate} for rate in rates])


def test_targets_say_whether_they_are_reached() -> None:
    results = {"cartpole-16": {"bare": outcome(100, 50, 80), "async": outcome(95, 44, 76)}}
    text = targets_table(results)
    line = next(line for line in text.splitlines() if "async / bare" in line)
    assert line.split()[-6:] == ["0.85", "0.950", "0.880", "..", "0.950", "reached"]
    assert "torchrl" not in text


def test_targets_name_what_there_is() -> None:
    for target in TARGETS:
        for item, part, _ in (target.above, *target.below):
            assert ITEMS[item].part(part)


def test_scaling_target_divides_by_the_number_of_workers() -> None:
    target = next(target for target in TARGETS if target.times == 8)
    ratio = target.ratios({"scaling": {"1": outcome(100.0), "8": outcome(760.0)}})
    assert ratio is not None
    assert ratio.median == pytest.approx(0.95)


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


def test_selection() -> None:
    assert [item.name for item, _ in select(None, None)] == list(ITEMS)
    [(item, parts)] = select(["cartpole-1"], ["sync"])
    assert (item.name, [part.name for part in parts]) == ("cartpole-1", ["sync"])
    assert {item.is_workload for item, _ in select(None, ["sync"])} == {True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "pong"], "--workload pong: unknown; there are: cartpole-1, "),
        (["--contender", "rllib"], "--contender rllib: unknown; there are: bare, "),
        (
            ["--workload", "atari", "--contender", "sync-compiled"],
            "none of --contender sync-compiled is measured on --workload atari",
        ),
    ],
)
def test_unknown_names(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "cartpole-64" in shown
    assert "torchrl-rpc-x2" in shown


def test_quick_run(tmp_path: Path, marked: Marked, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--quick", "--json", str(files[0]), "--png", str(files[1])]
    chosen = ["--contender", "bare", "--contender", "async"]
    assert main(["bench", *arguments, *chosen]) == 0
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
    arguments = ["bench", "--workload", "cartpole-1", "--contender", "rpc-async-x2"]
    bench = subprocess.Popen(
        [sys.executable, "-m", "distcollect", *arguments, "--seconds", "60"],
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
        "unwanted = 'distcollect.commands.bench', 'torchrl', 'stable_baselines3'\n"
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert out.stdout.strip() == b"[]"
