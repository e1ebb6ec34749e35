"""All that can be measured: items by name, and the parts of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks import (
    alternating,
    counting,
    faults,
    fetch,
    figures,
    native,
    ray_workers,
    replay,
    scale,
    start,
    weights,
)
from benchmarks.contenders import CONTENDERS, Contender, Values
from benchmarks.weights import MB
from benchmarks.workloads import WORKLOADS, Workload
from distcollect import BroadcastUpdater, SyncDataCollector

# Time for imports, starting workers and compiling, on top of the windows.
_LIMIT_S = 120.0
BROADCAST = BroadcastUpdater


@dataclass(frozen=True)
class Part:
    """One thing to measure, in a process of its own.

    Attributes:
        name: unique within its item.
        about: a description for the report.
        run: takes the window's length in seconds and returns named values.
        baseline: the part whose "frames_per_s" is its limit; None: it has no limit.
        needs: modules that must be installed.
        limit_s: seconds, on top of ten windows, after which it counts as hung.
    """

    name: str
    about: str
    run: Callable[[float], Values]
    baseline: str | None = None
    needs: tuple[str, ...] = ()
    limit_s: float = _LIMIT_S


@dataclass(frozen=True)
class Item:
    """Parts that are measured together, interleaved.

    Attributes:
        name: its name on the command line.
        about: a description for the report.
        parts: in the order in which each repeat measures them.
        is_workload: whether its parts are contenders.
    """

    name: str
    about: str
    parts: tuple[Part, ...]
    is_workload: bool = False

    def part(self, name: str) -> Part:
        """The part with this name."""
        return next(part for part in self.parts if part.name == name)


def _of_workload(workload: Workload) -> Item:
    def part(contender: Contender) -> Part:
        return Part(
            contender.name,
            contender.about,
            partial(contender.run, workload),
            contender.baseline,
            contender.needs + workload.needs,
        )

    fitting = (c for c in CONTENDERS.values() if c.only is None or workload.name in c.only)
    parts = tuple(part(contender) for contender in fitting)
    return Item(workload.name, workload.about, parts, is_workload=True)


def _scaling(num_workers: int, *, random: bool = False) -> Part:
    return Part(
        f"{num_workers}-random" if random else str(num_workers),
        f"{num_workers} worker(s){', random actions' if random else ''}",
        partial(figures.run_scaling, num_workers=num_workers, random=random),
        limit_s=_LIMIT_S + 10 * num_workers,
    )


def _bookkeeping(mode: str, num_workers: int) -> Part:
    run = partial(scale.run_rollouts, mode=mode, num_workers=num_workers)
    return Part(f"{mode}-{num_workers}", f"{mode}, {num_workers} workers", run)


def _channel(name: str) -> Part:
    run = partial(fetch.run_rpc_channel, channel=name)
    return Part(f"rpc-{name}", f"raw RPC over uv and {name}", run)


def _ours(name: str, about: str, *, mapped: bool) -> Part:
    return Part(name, about, partial(fetch.run_distcollect, mapped=mapped))


def _pushed(name: str, about: str, *, leaves: int, num_bytes: int) -> Item:
    raw = partial(weights.run_raw, num_bytes=num_bytes, num_receivers=3)
    ours = partial(weights.run_push, leaves=leaves, num_bytes=num_bytes, num_workers=3)
    return Item(
        name,
        about,
        (
            Part("raw", "raw Gloo broadcast", raw),
            Part("distcollect", "distcollect", ours),
            Part("broadcast", "distcollect.BroadcastUpdater", partial(ours, make=BROADCAST)),
        ),
    )


def _pushed_busy(name: str, about: str, num_bytes: int) -> Item:
    ours = partial(weights.run_busy, num_bytes=num_bytes)
    torchrl = partial(weights.run_busy_torchrl, num_bytes=num_bytes)
    about_torchrl = 'torchrl RPCCollector(launcher="mp")'
    return Item(
        name,
        about,
        (
            Part("distcollect", "distcollect", ours),
            Part("broadcast", "distcollect.BroadcastUpdater", partial(ours, make=BROADCAST)),
            Part("torchrl", about_torchrl, torchrl, needs=_TORCHRL),
        ),
    )


_SEVERAL_LEAVES = 4
_TORCHRL = ("torchrl",)
_CARTPOLES = ("cartpole-1", "cartpole-16", "cartpole-64")

# What each is, is in torchrl_envs.py.
_TORCHRL_KINDS = {
    "cartpole": "GymEnv, CartPole-v1",
    "pendulum": "GymEnv, Pendulum-v1",
    "serial": "SerialEnv, 4 times Pendulum-v1",
    "parallel": "ParallelEnv, 2 times Pendulum-v1",
    "transformed": "TransformedEnv, Pendulum-v1 with 5 transforms",
    "batched": "batch [16], 3 agents, nested keys",
    "gru": "Pendulum-v1, GRUModule and its primer",
    "lstm": "Pendulum-v1, LSTMModule and its primer",
    "cartpole-cheap": "CartPole-v1, a policy that costs nothing",
    "pendulum-cheap": "Pendulum-v1, a policy that costs nothing",
    "batched-cheap": "batch [16], 3 agents, a policy that costs nothing",
}


def _with_torchrl(function: str, seconds: float, /, **options: object) -> Values:
    """Call a function of a module that can be imported only with torchrl."""
    module = importlib.import_module("benchmarks.torchrl_envs")
    values: Values = getattr(module, function)(seconds, **options)
    return values


def _torchrl_part(part: str, about: str, function: str, /, **options: object) -> Part:
    return Part(part, about, partial(_with_torchrl, function, **options), needs=_TORCHRL)


# Functions of torchrl_async.py.
_ASYNC_COLLECTORS = {
    "ours": ("MultiaSyncDataCollector", "run_ours"),
    "multi": ("torchrl MultiAsyncCollector", "run_multi"),
    "batched": ("torchrl AsyncBatchedCollector, envs in threads", "run_batched_in_threads"),
    "batched-processes": ("the same, envs in processes", "run_batched_in_processes"),
}


def _torchrl_async(name: str, regime: str) -> Part:
    about, function = _ASYNC_COLLECTORS[name]

    def run(seconds: float) -> Values:
        module = importlib.import_module("benchmarks.torchrl_async")
        values: Values = getattr(module, function)(seconds, regime=regime)
        return values

    # Eight processes import TorchRL, which takes minutes while two cores do other work.
    return Part(f"{regime}-{name}", f"{about}, {regime}", run, needs=_TORCHRL, limit_s=600)


_FIGURES = (
    Item(
        "scaling",
        "workers with a 5 ms sleeping env",
        (
            *(_scaling(k) for k in (1, 8, 24, 64)),
            *(_scaling(k, random=True) for k in (1, 64)),
        ),
    ),
    Item(
        "fetch",
        "fetching a 64 MB rollout from another process",
        (
            _ours("distcollect", "distcollect, on one host", mapped=True),
            _ours("distcollect-rpc", "distcollect, as between hosts", mapped=False),
            _channel("cma"),
            _channel("mpt_uv"),
            _channel("basic"),
            Part("gloo", "raw Gloo recv, memory reused", fetch.run_gloo),
            Part("shared", "torch.multiprocessing, then a copy", fetch.run_shared_memory),
        ),
    ),
    Item(
        "wire",
        "bytes on the wire",
        (Part("atari", "an Atari rollout", figures.run_wire, needs=WORKLOADS["atari"].needs),),
    ),
    Item(
        "idle",
        "CPU time of processes that wait",
        (
            Part("trainer", "trainer in next(), slow envs", figures.run_waiting_trainer),
            Part("worker", "worker without a request", figures.run_idle_worker),
        ),
    ),
    Item(
        "replay",
        "start() fills a replay buffer",
        (
            Part(
                "cartpole-16", "CartPole-v1, 16 envs, 1 worker", replay.run_replay, needs=_TORCHRL
            ),
            *(
                Part(
                    f"{name}-{who}",
                    f"{workload.about}, 2 workers, {about}",
                    partial(run, name=name),
                    needs=_TORCHRL,
                )
                for name, workload in replay.FILLED.items()
                for who, about, run in (
                    ("trainer", "filled by the trainer's thread", replay.run_by_trainer),
                    ("alone", "each fills a buffer of its own", replay.run_by_themselves),
                    ("torchrl", "torchrl MultiAsyncCollector", replay.run_by_torchrl),
                )
            ),
        ),
    ),
    Item(
        "alternating",
        "SyncDataCollector and the bare loop, in turns within one process",
        tuple(
            Part(name, name, partial(alternating.run_beside_bare, name=name)) for name in _CARTPOLES
        ),
    ),
    Item(
        "seeded",
        "SyncDataCollector with a seed and without, in turns within one process",
        tuple(
            Part(
                name,
                name,
                partial(alternating.run_seeded, name=name),
                needs=WORKLOADS[name].needs,
            )
            for name in (*_CARTPOLES, "mujoco")
        ),
    ),
    Item(
        "ray",
        "RayDataCollector and RPCDataCollector, two workers each, in turns within one process",
        tuple(
            Part(name, name, partial(ray_workers.run_beside_local, name=name), needs=("ray",))
            for name in ("cartpole-16", "big-obs")
        ),
    ),
    Item(
        "native",
        "SyncDataCollector and a bare loop over the same vector env, in turns within one process",
        tuple(
            Part(name, each.about, partial(native.run_beside_loop, name=name), needs=each.needs)
            for name, each in native.NATIVE.items()
        ),
    ),
    Item(
        "native-x2",
        "two workers with a vector env each, and two bare loops side by side",
        tuple(
            Part(
                f"{name}-{who}",
                f"{native.NATIVE[name].about}, {about}",
                partial(run, name=name),
                f"{name}-loops",
                needs=native.NATIVE[name].needs,
            )
            for name in ("envpool-cartpole-256", "envpool-pong")
            for who, about, run in (
                ("workers", "MultiaSyncDataCollector", native.run_workers),
                ("loops", "bare loops", native.run_loops),
            )
        ),
    ),
    Item(
        "native-async",
        "EnvPool's CartPole, 16 envs, a step takes 5 ms on average, exponentially distributed",
        tuple(
            Part(name, about, run, "loop", needs=("envpool",))
            for name, about, run in (
                ("loop", "bare loop, 4 envs at a time", native.run_uneven_loop),
                ("async", "aSyncDataCollector, the same", native.run_uneven),
                ("sync", "the same, all envs at once", partial(native.run_uneven, at_once=True)),
                (
                    "on-policy",
                    "SyncDataCollector, 4 envs at a time",
                    partial(native.run_uneven, kind=SyncDataCollector),
                ),
            )
        ),
    ),
    Item(
        "torchrl",
        "TorchRL envs: ours / TorchRL's, in turns within one process; two workers, one after the "
        "other",
        (
            *(
                _torchrl_part(name, about, "run_beside_torchrl", name=name)
                for name, about in _TORCHRL_KINDS.items()
            ),
            _torchrl_part("rpc-x2", "RPCDataCollector, 2 workers", "run_workers", torchrl=False),
            _torchrl_part(
                "torchrl-rpc-x2",
                'torchrl RPCCollector(launcher="mp"), 2 workers',
                "run_workers",
                torchrl=True,
            ),
        ),
    ),
    Item(
        "torchrl-async",
        "TorchRL's workload for its asynchronous collectors: 8 envs, 1 ms of sleep a step, CNN",
        tuple(
            _torchrl_async(name, regime)
            for regime in ("uniform", "slow-reset")
            for name in _ASYNC_COLLECTORS
        ),
    ),
    Item(
        "counting",
        "what statistics cost",
        tuple(Part(name, name, partial(counting.run_counting, name=name)) for name in _CARTPOLES),
    ),
    _pushed(
        "push-64mb", "push of 64 MB to 3 idle workers", leaves=_SEVERAL_LEAVES, num_bytes=64 * MB
    ),
    _pushed_busy("push-1mb", "push of 1 MB to 2 collecting workers", 1 * MB),
    _pushed_busy("push-100mb", "push of 100 MB to 2 collecting workers", 100 * MB),
    Item(
        "pause",
        "how long a push stops the engine",
        (
            Part(
                "64mb",
                "64 MB, 3 idle workers",
                partial(
                    weights.run_pause, leaves=_SEVERAL_LEAVES, num_bytes=64 * MB, num_workers=3
                ),
            ),
        ),
    ),
    Item(
        "kill",
        "workers that are killed or stopped",
        (
            Part("survivors", "one of four killed", faults.run_survivors),
            Part("stopped", "one of two stopped", faults.run_stopped),
            Part("recovery", "one of four killed and replaced", faults.run_recovery, limit_s=300),
        ),
    ),
    Item(
        "start",
        "from making a collector to its first batch",
        (
            Part("1", "1 worker", partial(start.run_start, num_workers=1)),
            Part("8", "8 workers", partial(start.run_start, num_workers=8)),
            Part(
                "sb3-8",
                "Stable-Baselines3, SubprocVecEnv with 8",
                partial(start.run_sb3, num_workers=8),
                needs=("stable_baselines3",),
            ),
            Part(
                "torchrl-8",
                "torchrl MultiSyncCollector with 8",
                partial(start.run_torchrl, num_workers=8),
                needs=_TORCHRL,
            ),
            Part("replacement", "one of two workers killed", start.run_replacement),
            Part("memory", "8 more idle workers", partial(start.run_memory, use="keep")),
            Part("memory-alone", "the same, not forked", partial(start.run_memory, use="off")),
        ),
    ),
    Item(
        "scale",
        "the trainer's bookkeeping for simulated workers",
        (
            *(_bookkeeping(mode, w) for mode in scale.MODES for w in (10, 1_000, 10_000)),
            Part("joins", "1,000 workers join", partial(scale.run_joins, num_workers=1_000)),
            Part("pushes", "to halves of 1,000", partial(scale.run_pushes, num_workers=1_000)),
            Part(
                "soak",
                "10,000 workers, each replaced 20 times",
                partial(scale.run_soak, num_workers=10_000, num_replacements=20),
                limit_s=600,
            ),
        ),
    ),
    Item(
        "churn",
        "200 kills in one run",
        (Part("kills", "four workers at a time", faults.run_churn, limit_s=1800),),
    ),
    Item(
        "straggler",
        "eight workers, preemptive_threshold=0.75",
        (
            Part("even", "equally fast", partial(faults.run_straggler, slow=False)),
            Part("slow", "one 5 times slower", partial(faults.run_straggler, slow=True)),
        ),
    ),
)

ITEMS: dict[str, Item] = {
    item.name: item for item in (*map(_of_workload, WORKLOADS.values()), *_FIGURES)
}
