"""Reads the file of a trace, and checks what holds for each."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from distcollect.telemetry.trace import STEPS, WEIGHTS

Events = list[dict[str, Any]]


def load(path: Path) -> Events:
    events: Events = json.loads(path.read_text())
    return events


def names(events: Events, kind: str) -> dict[Any, str]:
    """Of "process" by pid, of "thread" by (pid, tid)."""
    named = [event for event in events if event["name"] == f"{kind}_name"]
    key = (lambda e: e["pid"]) if kind == "process" else (lambda e: (e["pid"], e["tid"]))
    result = {key(event): event["args"]["name"] for event in named}
    assert len(result) == len(named)
    return result


def spans(events: Events, process: str, thread: str) -> list[tuple[str, float, float]]:
    """(name, begin, end) in microseconds, in the order in which they began."""
    pids, tids = names(events, "process"), names(events, "thread")
    found = [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and (pids[e["pid"]], tids[e["pid"], e["tid"]]) == (process, thread)
    ]
    return sorted(found, key=lambda span: (span[1], -span[2]))


def fetches(events: Events, worker: str) -> list[tuple[float, float]]:
    """Begin and end of each, in microseconds."""
    by_id: dict[Any, dict[str, float]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "be" and event["name"] == f"fetch from {worker}":
            by_id[event["cat"], event["id2"]["local"]][event["ph"]] = event["ts"]
    return sorted((pair["b"], pair["e"]) for pair in by_id.values())


def clocks(events: Events, worker: str) -> list[tuple[float, float]]:
    """By how many seconds its clock is ahead of the trainer's, and the error; of each rollout."""
    pids = names(events, "process")
    of_worker = (e for e in events if pids[e["pid"]] == worker and e["name"] == "rollout")
    told = (event.get("args", {}) for event in of_worker)
    return [(about.get("clock_ahead_s", 0.0), about.get("error_s", 0.0)) for about in told]


def assert_in_order(events: Events, worker: str, error_us: float = 0.0) -> None:
    """What one process did and what another did for that are in order, but for such an error."""
    rollouts = [span for span in spans(events, worker, STEPS) if span[0] == "rollout"]
    fetched = fetches(events, worker)
    assert len(fetched) == len(rollouts)
    for (_, _, ended), (begun, _) in zip(rollouts, fetched, strict=True):
        assert ended <= begun + error_us
    pushes = {name: (b, e) for name, b, e in spans(events, "trainer", WEIGHTS) if "push" in name}
    received = spans(events, worker, WEIGHTS)
    assert received
    for name, begin, end in received:
        pushed, acknowledged = pushes[name.replace("receive", "push")]
        assert pushed - error_us <= begin <= end <= acknowledged + error_us, name


def assert_named(events: Events, processes: set[str]) -> None:
    """All that happens does so on a thread that has a name, in one of these processes."""
    pids, tids = names(events, "process"), names(events, "thread")
    assert sorted(pids.values()) == sorted(processes)
    assert {(event["pid"], event["tid"]) for event in events} == tids.keys()
    assert {pid for pid, _ in tids} == pids.keys()
    # Perfetto goes by these alone.
    assert len({tid for _, tid in tids}) == len(tids)


def assert_nested(events: Events) -> None:
    """On each thread a span lies within another or beside it; else viewers leave it out."""
    for event in events:
        assert event.get("ts", 0) >= 0
        # Exact in floating point, and as whole nanoseconds.
        assert all(float(event.get(key, 0) * 8).is_integer() for key in ("ts", "dur"))
    pids, tids = names(events, "process"), names(events, "thread")
    for pid, tid in tids:
        open_until: list[float] = []
        for _, begin, end in spans(events, pids[pid], tids[pid, tid]):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def assert_answered(events: Events, worker: str) -> None:
    """Each rollout of a worker lies within a question of the trainer's and its answer."""
    remote_calls = [(begin, end) for _, begin, end in spans(events, "trainer", f"ask {worker}")]
    steps = spans(events, worker, STEPS)
    rollouts = [span for span in steps if span[0] == "rollout"]
    assert len(rollouts) == len(remote_calls) > 0
    for (_, begin, end), (asked, heard) in zip(rollouts, remote_calls, strict=True):
        assert asked <= begin < end <= heard
    # All else is part of one.
    for _, begin, end in steps:
        assert any(asked <= begin <= end <= heard for asked, heard in remote_calls)
