"""Bounds for ratios of measured values; each target is a line of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.runner import Outcome
from benchmarks.stats import Spread, best, paired

Results: TypeAlias = "Mapping[str, Mapping[str, Outcome]]"
# The names of an item, of a part of it, and of one of the part's values.
Source: TypeAlias = "tuple[str, str, str]"


@dataclass(frozen=True)
class Target:
    """A ratio and its bound.

    Attributes:
        what: a description for the report.
        above: the numerator.
        below: the denominator: the largest of these within a repeat; empty: 1.
        bound: for the median ratio.
        at_least: whether the ratio must be at least the bound, or at most.
        times: factor of the denominator.
    """

    what: str
    above: Source
    below: tuple[Source, ...]
    bound: float
    at_least: bool = True
    times: float = 1.0

    def ratios(self, results: Results) -> Spread | None:
        """The ratio of each repeat; None if one side was not measured."""
        above = _values(results, self.above)
        if above is None:
            return None
        columns = [_values(results, source) for source in self.below]
        there = [column for column in columns if column is not None]
        if not there:
            return None if self.below else Spread.of(above)
        below = [None if value is None else value * self.times for value in best(*there)]
        return Spread.of(paired(above, below))

    def reached(self, ratio: float) -> bool:
        """Whether ``ratio`` is within the bound."""
        return ratio >= self.bound if self.at_least else ratio <= self.bound


def _values(results: Results, source: Source) -> list[float | None] | None:
    item, part, name = source
    if item not in results or part not in results[item]:
        return None
    return [None if values is None else values[name] for values in results[item][part].values]


def _rate(item: str, contender: str) -> Source:
    return item, contender, "frames_per_s"


def _over(workload: str, above: str, below: str, bound: float) -> Target:
    what = f"{above} / {below}, {workload}"
    return Target(what, _rate(workload, above), (_rate(workload, below),), bound)


def _beside_bare(workload: str, bound: float) -> Target:
    return Target(f"sync / bare, {workload}", ("alternating", workload, "speed_ratio"), (), bound)


def _with_ray(workload: str) -> Target:
    what = f"frames/s of two workers with Ray / without, {workload}"
    return Target(what, ("ray", workload, "speed_ratio"), (), 0.95)


def _beside_native(name: str, bound: float) -> Target:
    return Target(f"sync / bare, {name}", ("native", name, "speed_ratio"), (), bound)


def _beside_torchrl(kind: str, bound: float) -> Target:
    what = f"frames per CPU second, ours / torchrl's, {kind}"
    return Target(what, ("torchrl", kind, "cpu_ratio"), (), bound)


def _workers_beside_torchrl(what: str, value: str) -> Target:
    above, below = ("torchrl", "rpc-x2", value), ("torchrl", "torchrl-rpc-x2", value)
    return Target(f"{what}, ours / torchrl's, Pendulum, 2 workers", above, (below,), 2)


def _scaling(num_workers: int, bound: float, kind: str = "") -> Target:
    what = f"{num_workers}{kind} sleeping workers / {num_workers} x one"
    one = _rate("scaling", f"1{kind}")
    return Target(what, _rate("scaling", f"{num_workers}{kind}"), (one,), bound, times=num_workers)


def _at_most(what: str, bound: float, above: Source, *below: Source) -> Target:
    return Target(what, above, below, bound, at_least=False)


def _pushed(what: str, part: str) -> Target:
    above, raw = ("push-64mb", part, "gb_per_s"), ("push-64mb", "raw", "gb_per_s")
    return Target(f"{what} / raw broadcast", above, (raw,), 0.75)


def _peers_push(size: str, item: str, bound: float, ours: str = "distcollect") -> Target:
    what = f"torchrl's push / {ours}, {size}, collecting"
    return Target(what, (item, "torchrl", "s"), ((item, ours, "s"),), bound)


def _starts(*parts: str) -> tuple[Source, ...]:
    return tuple(("start", part, "first_s") for part in parts)


def _bookkeeping(mode: str) -> Target:
    cost = tuple(("scale", f"{mode}-{w}", "us_per_rollout") for w in (10_000, 10))
    return _at_most(f"bookkeeping of a rollout, 10,000 workers / 10, {mode}", 1.5, *cost)


_RAW_WAYS = ("rpc-cma", "rpc-mpt_uv", "rpc-basic", "gloo", "shared")

TARGETS: tuple[Target, ...] = (
    _beside_bare("cartpole-16", 0.90),
    _beside_bare("cartpole-64", 0.90),
    _beside_bare("cartpole-1", 0.75),
    Target(
        "seeded / unseeded, time, cartpole-16",
        ("seeded", "cartpole-16", "time_ratio"),
        (),
        1.1,
        at_least=False,
    ),
    _beside_native("envpool-cartpole-16", 0.90),
    _beside_native("envpool-cartpole-256", 0.90),
    _beside_native("envpool-cartpole-1024", 0.90),
    _beside_native("envpool-pong", 0.97),
    _beside_native("envpool-cheetah", 0.95),
    _beside_native("envpool-ant", 0.95),
    _beside_native("ale-pong", 0.97),
    *(
        _over("native-x2", f"{name}-workers", f"{name}-loops", 0.90)
        for name in ("envpool-cartpole-256", "envpool-pong")
    ),
    *(
        Target(
            f"ours / the best of torchrl's asynchronous collectors, {regime}",
            _rate("torchrl-async", f"{regime}-ours"),
            tuple(
                _rate("torchrl-async", f"{regime}-{name}")
                for name in ("multi", "batched", "batched-processes")
            ),
            1.2,
        )
        for regime in ("uniform", "slow-reset")
    ),
    _over("native-async", "async", "sync", 1.3),
    _over("native-async", "async", "loop", 0.95),
    _over("cartpole-16", "rpc-async-x2", "bare-x2", 0.85),
    _over("cartpole-16", "async", "bare", 0.85),
    _over("cartpole-16", "multi-async-x2", "bare-x2", 0.85),
    _over("spin-1ms", "rpc-async-x2", "bare-x2", 0.93),
    _over("mujoco", "rpc-async-x2", "bare-x2", 0.93),
    _over("atari", "rpc-async-x2", "bare-x2", 0.93),
    _over("cartpole-1", "rpc-async-x2", "torchrl-rpc-x2", 6),
    _over("cartpole-16", "rpc-async-x2", "torchrl-rpc-x2", 5),
    _over("cartpole-1", "sync", "torchrl", 3.5),
    _over("cartpole-16", "sync", "torchrl", 3),
    *(
        _beside_torchrl(kind, 1)
        for kind in (
            "cartpole",
            "pendulum",
            "serial",
            "parallel",
            "transformed",
            "batched",
            "gru",
            "lstm",
        )
    ),
    *(_beside_torchrl(kind, 1.5) for kind in ("cartpole-cheap", "pendulum-cheap", "batched-cheap")),
    _workers_beside_torchrl("frames/s", "frames_per_s"),
    _workers_beside_torchrl("frames per CPU second", "frames_per_cpu_s"),
    _over("cartpole-1", "sync-compiled", "bare", 1.3),
    _with_ray("cartpole-16"),
    _with_ray("big-obs"),
    _scaling(8, 0.95),
    _scaling(24, 0.90),
    _scaling(64, 0.90),
    _scaling(64, 0.90, "-random"),
    Target(
        "64 MB fetch / the best of torch's own ways",
        ("fetch", "distcollect", "gb_per_s"),
        tuple(("fetch", way, "gb_per_s") for way in _RAW_WAYS),
        0.90,
    ),
    _at_most(
        "bytes on the wire / one copy, Atari",
        1.05,
        ("wire", "atari", "bytes_on_wire"),
        ("wire", "atari", "bytes_of_one_copy"),
    ),
    _at_most("CPU time of a waiting trainer / a core", 0.02, ("idle", "trainer", "core_share")),
    _at_most(
        "CPU time of the thread of start() / a core", 0.05, ("replay", "cartpole-16", "core_share")
    ),
    _at_most("CPU time of an idle worker / a core", 0.02, ("idle", "worker", "core_share")),
    *(
        _at_most(
            f"CPU time with statistics / without, {name}", 1.01, ("counting", name, "cpu_ratio")
        )
        for name in ("cartpole-1", "cartpole-16", "cartpole-64")
    ),
    _pushed("64 MB push", "distcollect"),
    _pushed("64 MB push by BroadcastUpdater", "broadcast"),
    _peers_push("1 MB", "push-1mb", 3),
    _peers_push("1 MB", "push-1mb", 3, "broadcast"),
    _peers_push("100 MB", "push-100mb", 1.5),
    _peers_push("100 MB", "push-100mb", 1.5, "broadcast"),
    _at_most(
        "pause of stepping / 64 MB push",
        0.05,
        ("pause", "64mb", "apply_s"),
        ("pause", "64mb", "push_s"),
    ),
    Target(
        "frames/s after one of four workers was killed / 3/4 of before",
        ("kill", "survivors", "after"),
        (("kill", "survivors", "before"),),
        0.95,
        times=0.75,
    ),
    _at_most("seconds until a killed worker counts as lost", 1, ("kill", "survivors", "seen_s")),
    _at_most("seconds until a stopped worker counts as lost", 10, ("kill", "stopped", "seen_s")),
    _at_most(
        "from a kill to the replacement's first frames / a first start",
        1.2,
        ("kill", "recovery", "recovery_s"),
        ("kill", "recovery", "cold_s"),
    ),
    _at_most("start of 8 workers / of SubprocVecEnv", 0.5, *_starts("8", "sb3-8")),
    _at_most("start of 8 workers / of torchrl's MultiSync", 0.25, *_starts("8", "torchrl-8")),
    _at_most("start of 8 workers / of 1", 1.3, *_starts("8", "1")),
    _at_most("seconds to start 8 workers again", 0.5, ("start", "8", "second_s")),
    _at_most(
        "seconds from a kill to frames of the replacement",
        0.5,
        ("start", "replacement", "replaced_s"),
    ),
    _at_most("MB for one more idle worker", 60, ("start", "memory", "mb_per_worker")),
    *(_bookkeeping(mode) for mode in ("sync", "async", "paced", "in turn", "replacement")),
    *(
        _at_most(
            f"us of Python for a rollout, 1,000 workers, {mode}",
            60,
            ("scale", f"{mode}-1000", "us_of_python"),
        )
        for mode in ("sync", "async", "paced", "in turn")
    ),
    _at_most(
        "ms of bookkeeping for a sync batch of 1,000 workers",
        20,
        ("scale", "sync-1000", "ms_per_batch"),
    ),
    _at_most("seconds of bookkeeping for 1,000 joins", 2, ("scale", "joins", "joined_s")),
    _at_most("MB that the trainer keeps for each kill", 0.1, ("churn", "kills", "mb_per_kill")),
    _at_most("threads that remain after 200 kills", 0, ("churn", "kills", "threads")),
    _at_most("open files that remain after 200 kills", 0, ("churn", "kills", "descriptors")),
    Target(
        "frames/s with one of eight workers 5 times slower / none",
        ("straggler", "slow", "frames_per_s"),
        (("straggler", "even", "frames_per_s"),),
        0.70,
    ),
)
