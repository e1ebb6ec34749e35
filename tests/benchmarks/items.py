"""All that can be measured: items by name, and the parts of each."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Values: TypeAlias = dict[str, float]

# Time for imports, starting workers and compiling, on top of the windows.
_LIMIT_S = 120.0
_TORCHRL, _ENVPOOL, _ATARI = ("torchrl",), ("envpool",), ("ale_py", "cv2")
_CARTPOLES = ("cartpole-1", "cartpole-16", "cartpole-64")


@dataclass(frozen=True)
class Part:
    """One thing to measure, in a process of its own.

    Attributes:
        about: a description for the report.
        function: ``module:function`` of this package, which is imported when it is measured; it
            takes the window's length in seconds, and returns named values.
        options: its other arguments.
        baseline: the part of the same item whose "frames_per_s" is its limit; None: it has none.
        needs: modules that must be installed.
        limit_s: seconds, on top of ten windows, after which it counts as hung.
    """

    about: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    needs: tuple[str, ...] = ()
    limit_s: float = _LIMIT_S

    def run(self, seconds: float) -> Values:
        """Measure it here and now."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
        return function(seconds, **self.options)


@dataclass(frozen=True)
class Item:
    """Parts that are measured together, interleaved.

    Attributes:
        about: a description for the report.
        parts: by name, in the order in which each repeat measures them.
    """

    about: str
    parts: Mapping[str, Part]


def _workload(name: str, about: str, needs: tuple[str, ...] = ()) -> Item:
    """A workload with all contenders."""

    def contender(about: str, function: str, baseline: str, *more: str, **options: Any) -> Part:
        return Part(about, function, {"name": name, **options}, baseline, (*needs, *more))

    rpc = {"kind": "RPCDataCollector", "num_workers": 2}
    parts = {
        "bare": contender("bare loop", "contenders:run_bare", "bare", num_processes=1),
        "bare-x2": contender("2 bare loops", "contenders:run_bare", "bare-x2", num_processes=2),
        "sync": contender("SyncDataCollector", "contenders:run_sync", "bare"),
        "async": contender(
            "aSyncDataCollector", "contenders:run_workers", "bare", kind="aSyncDataCollector"
        ),
        "multi-async-x2": contender(
            "MultiaSyncDataCollector",
            "contenders:run_workers",
            "bare-x2",
            kind="MultiaSyncDataCollector",
            num_workers=2,
        ),
        "multi-sync-x2": contender(
            "MultiSyncDataCollector",
            "contenders:run_workers",
            "bare-x2",
            kind="MultiSyncDataCollector",
            num_workers=2,
        ),
        "rpc-async-x2": contender("RPCDataCollector", "contenders:run_workers", "bare-x2", **rpc),
        "rpc-sync-x2": contender(
            "RPCDataCollector(sync=True)", "contenders:run_workers", "bare-x2", **rpc, sync=True
        ),
        "torchrl": contender("torchrl Collector", "peers:run_torchrl", "bare", *_TORCHRL),
        "torchrl-rpc-x2": contender(
            'torchrl RPCCollector(launcher="mp")', "peers:run_torchrl_rpc", "bare-x2", *_TORCHRL
        ),
    }
    return Item(about, parts)


def _in_turn(about: str, function: str, names: tuple[str, ...], *needs: str) -> Item:
    return Item(about, {n: Part(n, function, {"name": n}, needs=needs) for n in names})


def _scaling() -> Iterator[tuple[str, Part]]:
    for kind, counts in (("", (1, 8, 24, 64)), ("-random", (1, 64))):
        for count in counts:
            options = {"num_workers": count, "random": bool(kind)}
            about = f"{count} worker(s){', random actions' if kind else ''}"
            limit_s = _LIMIT_S + 10 * count
            yield f"{count}{kind}", Part(about, "contenders:run_sleeping", options, limit_s=limit_s)


def _replay() -> Iterator[tuple[str, Part]]:
    for name in ("cartpole-16", "pixels"):
        for who, about in (
            ("trainer", "filled by the trainer's thread"),
            ("themselves", "each process fills a buffer of its own"),
            ("torchrl", "torchrl MultiAsyncCollector"),
        ):
            function = f"replay:run_by_{who}"
            words = f"{name}, 2 workers, {about}"
            yield f"{name}-{who}", Part(words, function, {"name": name}, needs=_TORCHRL)


def _start() -> Iterator[tuple[str, Part]]:
    for count in (1, 8):
        yield str(count), Part(f"{count} worker(s)", "start:run_start", {"num_workers": count})
    about = "torchrl MultiSyncCollector with 8"
    yield "torchrl-8", Part(about, "start:run_torchrl", {"num_workers": 8}, needs=_TORCHRL)
    yield "replacement", Part("one of two workers killed", "start:run_replacement")
    yield "memory", Part("8 more idle workers", "start:run_memory", {"use": "keep"})
    yield "memory-alone", Part("the same, not forked", "start:run_memory", {"use": "off"})


def _scale() -> Iterator[tuple[str, Part]]:
    for mode in ("sync", "async", "paced", "in turn"):
        for count in (10, 1_000, 10_000):
            options = {"mode": mode, "num_workers": count}
            about = f"{mode}, {count} workers"
            yield f"{mode}-{count}", Part(about, "scale:run_rollouts", options)
    yield "joins", Part("1,000 workers join", "scale:run_joins", {"num_workers": 1_000})
    yield "pushes", Part("to halves of 1,000", "scale:run_pushes", {"num_workers": 1_000})


def _fetch() -> Iterator[tuple[str, Part]]:
    for name, num_bytes in (("3kB", 3_000), ("1MB", 1_000_000), ("28MB", 28_000_000)):
        yield name, Part(f"rollouts of {name}", "fetch:run", {"num_bytes": num_bytes})
    yield "256-workers", Part("256 workers", "fetch:run_light", {"num_workers": 256})


def _torchrl_async() -> Iterator[tuple[str, Part]]:
    for regime in ("uniform", "slow-reset"):
        for who, about in (
            ("ours", "MultiaSyncDataCollector"),
            ("multi", "torchrl MultiAsyncCollector"),
            ("threads", "torchrl AsyncBatchedCollector, envs in threads"),
            ("processes", "the same, envs in processes"),
        ):
            # Eight processes import TorchRL, which takes minutes while two cores do other work.
            part = Part(
                f"{about}, {regime}",
                "torchrl_async:run",
                {"regime": regime, "who": who},
                needs=_TORCHRL,
                limit_s=600,
            )
            yield f"{regime}-{who}", part


def _inference() -> Iterator[tuple[str, Part]]:
    for prefix, about in (("images", "8 workers, CNN"), ("cartpole", "1 worker, 64x64 MLP")):
        for where in ("worker", "host", "auto"):
            options = {"where": where, "images": prefix == "images"}
            words = f"{about}, Inference({where!r})"
            baseline = f"{prefix}-worker" if where != "worker" else None
            yield f"{prefix}-{where}", Part(words, "contenders:run_inference", options, baseline)


_NATIVE = (
    *(f"envpool-{name}" for name in ("cartpole-16", "cartpole-256", "cartpole-1024", "pong")),
    *("envpool-cheetah", "envpool-ant"),
)
_TORCHRL_KINDS = "cartpole", "pendulum", "serial", "parallel"
_UNEVEN = {
    "loop": Part("bare loop, 4 envs at a time", "native:run_uneven_loop", needs=_ENVPOOL),
    "async": Part("aSyncDataCollector, the same", "native:run_uneven", {}, "loop", _ENVPOOL),
    "sync": Part(
        "the same, all envs at once", "native:run_uneven", {"at_once": True}, "loop", _ENVPOOL
    ),
}

ITEMS: dict[str, Item] = {
    "cartpole-1": _workload("cartpole-1", "CartPole-v1, 64x64 MLP, 1 env"),
    "cartpole-16": _workload("cartpole-16", "CartPole-v1, 64x64 MLP, 16 envs"),
    "cartpole-64": _workload("cartpole-64", "CartPole-v1, 64x64 MLP, 64 envs"),
    "atari": _workload("atari", "ALE/Breakout-v5, 84x84x4 uint8, small CNN, 4 envs", _ATARI),
    "alternating": _in_turn(
        "SyncDataCollector and the bare loop, in turn", "alternating:run_beside_bare", _CARTPOLES
    ),
    "seeded": _in_turn(
        "SyncDataCollector with and without a seed, in turn", "alternating:run_seeded", _CARTPOLES
    ),
    "native": Item(
        "SyncDataCollector and a bare loop over the same vector env, in turn",
        {
            **_in_turn("", "native:run_beside_loop", _NATIVE, *_ENVPOOL).parts,
            **_in_turn("", "native:run_beside_loop", ("ale-pong",), "ale_py").parts,
            **_in_turn("", "native:run_beside_loop", ("gymnasium-cartpole-16",)).parts,
        },
    ),
    "native-async": Item("EnvPool's CartPole, a step takes 5 ms on average", _UNEVEN),
    "torchrl": Item(
        "TorchRL envs: ours / TorchRL's, in turn; two workers one after the other",
        {
            **_in_turn("", "torchrl_envs:run_beside", _TORCHRL_KINDS, *_TORCHRL).parts,
            "rpc-x2": Part("RPCDataCollector", "torchrl_envs:run_workers", needs=_TORCHRL),
            "torchrl-rpc-x2": Part(
                'torchrl RPCCollector(launcher="mp")',
                "torchrl_envs:run_workers",
                {"torchrl": True},
                needs=_TORCHRL,
            ),
        },
    ),
    "torchrl-async": Item(
        "TorchRL's workload for its asynchronous collectors: 8 envs, 1 ms of sleep a step, CNN",
        dict(_torchrl_async()),
    ),
    "replay": Item("start() fills a replay buffer", dict(_replay())),
    "start": Item("from making a collector to its first batch", dict(_start())),
    "fetch": Item("a rollout over each transport, in turn", dict(_fetch())),
    "hosts": Item(
        "weights to two workers on another host, and their rollouts, in turn; needs root",
        {
            "push-1-mb": Part("push of 1 MB", "hosts:run_pushes", {"num_bytes": 1_000_000}),
            "push-100-mb": Part("push of 100 MB", "hosts:run_pushes", {"num_bytes": 100_000_000}),
            "link-2-ms": Part("link of 2 ms", "hosts:run_link", {"delay_ms": 2}),
        },
    ),
    "inference": Item("policies in workers, and in an inference server", dict(_inference())),
    "scaling": Item("workers with a 5 ms sleeping env", dict(_scaling())),
    "scale": Item("the trainer's bookkeeping for simulated workers", dict(_scale())),
}
