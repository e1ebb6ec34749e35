"""The statistics, targets and arguments of the benchmark."""

from __future__ import annotations

from itertools import count

import pytest
from benchmarks.__main__ import main
from benchmarks.command import select
from benchmarks.items import ITEMS
from benchmarks.report import targets_table
from benchmarks.runner import Outcome
from benchmarks.stats import Spread, best, paired
from benchmarks.targets import TARGETS
from benchmarks.windows import NotEnough, frames_per_s


def test_spread() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([None]) is None


def test_ratios_are_paired_within_a_repeat() -> None:
    # In the second repeat the machine is half as fast; the ratio stays.
    assert paired([80.0, 40.0, None, 1.0], [100.0, 50.0, 100.0, 0.0]) == [0.8, 0.8, None, None]
    assert best([1.0, None], [2.0, None]) == [2.0, None]


def test_window_counts_whole_batches_of_each_source() -> None:
    # Source 0 gives 10 frames each 2 s, source 1 gives 30 frames each 3 s.
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
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "cartpole-64" in shown
    assert "torchrl-rpc-x2" in shown
