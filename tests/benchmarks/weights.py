"""How long a push of weights takes: distcollect's, torch's plain broadcast, and TorchRL's.

All over Gloo on the CPU, on one host. A figure is the median over the window's pushes, without the
first few. MB are 10**6 bytes, GB 10**9, all times are in seconds. A push of distcollect gives:

- "s": the whole ``update_policy_weights_(wait=True)``, as its caller sees it, snapshot included;
- "ready_s", "transfer_s", "acknowledge_s" and "total_s": see ``PushHandle.timings``.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.contenders import NUM_WORKERS, Values, make_rpc
from benchmarks.fetch import LOOPBACK, other_process, received
from benchmarks.workloads import (
    Chosen,
    Workload,
    make_cartpole,
    make_trivial,
    small_policy,
)
from distcollect import RPCDataCollector, WeightUpdaterBase
from distcollect.policy.live_weights import LiveWeights

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

MB = 10**6
MakeUpdater: TypeAlias = Callable[[], WeightUpdaterBase]
_WARM_UP = 2
_ENOUGH = 5  # pushes, at least
_APPLICATIONS = 50
_FLOAT_BYTES = 4


class Weighty(nn.Module):
    """A policy that uses none of its parameters: ``leaves`` of equal size."""

    def __init__(self, leaves: int, num_bytes: int) -> None:
        """``num_bytes``: of all leaves together."""
        super().__init__()
        size = num_bytes // leaves // _FLOAT_BYTES
        self.leaves = nn.ParameterList(torch.full((size,), 0.5) for _ in range(leaves))

    def forward(self, observation: Tensor) -> Tensor:
        """``[n, *obs]`` to int64 ``[n]``: always 0."""
        return torch.zeros(len(observation), dtype=torch.int64)


class Padded(nn.Module):
    """The workloads' small policy, and one more parameter that it doesn't use."""

    def __init__(self, num_bytes: int) -> None:
        """``num_bytes``: of the unused parameter."""
        super().__init__()
        self.policy = small_policy()
        self.unused = nn.Parameter(torch.full((num_bytes // _FLOAT_BYTES,), 0.5))

    def forward(self, observation: Tensor) -> Chosen:
        """As the small policy does."""
        chosen: Chosen = self.policy(observation)
        return chosen


def run_push(
    seconds: float,
    *,
    leaves: int,
    num_bytes: int,
    num_workers: int,
    make: MakeUpdater | None = None,
) -> Values:
    """Push to ``num_workers`` idle workers.

    "gb_per_s": bytes over "s". Each byte counts once, however many workers receive it.
    """
    with _idle_collector(leaves, num_bytes, num_workers, make) as collector:
        values = _medians(partial(_push, collector), seconds)
    values["gb_per_s"] = num_bytes / values["s"] / 1e9
    return values


def run_raw(seconds: float, *, num_bytes: int, num_receivers: int) -> Values:
    """Broadcast one tensor to processes that already wait in the same broadcast.

    "s": until every receiver has confirmed over a pipe that it has the tensor, "gb_per_s": bytes
    over that; "root_s": until the sender's own part is done, while receivers may still pass it on.
    """
    size = num_receivers + 1
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pipes = [
            stack.enter_context(other_process(_serve_broadcast, folder, rank, size, num_bytes))
            for rank in range(1, size)
        ]
        group = _join(folder, 0, size)
        flat = torch.full((num_bytes,), 7, dtype=torch.uint8)

        def get_ready() -> None:
            for pipe in pipes:
                pipe.send("next")
            for pipe in pipes:
                received(pipe)

        def broadcast() -> Values:
            begin = time.perf_counter()
            _broadcast(group, flat)
            root_s = time.perf_counter() - begin
            for pipe in pipes:
                received(pipe)
            return {"root_s": root_s}

        values = _medians(broadcast, seconds, between=get_ready)
        for pipe in pipes:
            pipe.send("bye")
    values["gb_per_s"] = num_bytes / values["s"] / 1e9
    return values


def run_busy(seconds: float, *, num_bytes: int, make: MakeUpdater | None = None) -> Values:
    """Push to two workers that collect; a batch is taken before each push."""
    workload = _busy_workload(num_bytes)
    updater = None if make is None else make()
    with make_rpc(
        workload, sync=False, num_workers=NUM_WORKERS, weight_updater=updater
    ) as collector:
        return _medians(partial(_push, collector), seconds, between=collector.next)


def run_busy_torchrl(seconds: float, *, num_bytes: int) -> Values:
    """TorchRL's ``RPCCollector.update_policy_weights_`` in the same situation.

    Like distcollect's, it returns when both workers have received and applied the weights. But it
    writes them into the policy's own parameters while the policy may be choosing actions with
    them, and workers acknowledge neither a version nor a checksum.
    """
    workload = _busy_workload(num_bytes)
    collector = peers.make_torchrl_rpc(workload)
    batches = iter(collector)

    def push() -> Values:
        collector.update_policy_weights_(collector.policy)
        return {}

    return _medians(push, seconds, between=partial(next, batches))


def run_pause(seconds: float, *, leaves: int, num_bytes: int, num_workers: int) -> Values:
    """How long an engine stops stepping for a push, and how long the push takes.

    "apply_s": one ``LiveWeights.apply()`` in this process; "push_s": "total_s" of a push to
    ``num_workers`` idle workers.
    """
    live = LiveWeights(Weighty(leaves, num_bytes))
    took = []
    for version in range(1, _APPLICATIONS + 1):
        live.commit(live.spare(), version)
        begin = time.perf_counter()
        live.apply()
        took.append(time.perf_counter() - begin)
    pushed = run_push(seconds, leaves=leaves, num_bytes=num_bytes, num_workers=num_workers)
    return {"apply_s": median(took), "push_s": pushed["total_s"]}


def _idle_collector(
    leaves: int, num_bytes: int, num_workers: int, make: MakeUpdater | None = None
) -> RPCDataCollector:
    return RPCDataCollector(
        make_trivial,
        Weighty(leaves, num_bytes),
        frames_per_batch=num_workers,
        num_workers=num_workers,
        sync=True,
        weight_updater=None if make is None else make(),
    )


def _busy_workload(num_bytes: int) -> Workload:
    about = f"CartPole-v1, 16 envs, {num_bytes} bytes of parameters"
    return Workload("busy", about, make_cartpole, partial(Padded, num_bytes), 16, 256)


def _push(collector: RPCDataCollector) -> Values:
    handle = collector.update_policy_weights_()
    assert handle is not None
    if handle.left_out:
        raise RuntimeError(f"a push did not reach every worker: {handle.left_out}")
    return dict(handle.timings)


def _medians(
    push: Callable[[], Values], seconds: float, between: Callable[[], object] = lambda: None
) -> Values:
    """Medians of the values that ``push`` returns, and of its duration "s".

    Args:
        push: makes one push.
        seconds: least length of the window after the warm-up.
        between: called before each push, not measured.
    """
    rows: list[Values] = []
    begin = time.perf_counter()
    for count in itertools.count():
        if count == _WARM_UP:
            rows.clear()
            begin = time.perf_counter()
        if len(rows) >= _ENOUGH and time.perf_counter() - begin >= seconds:
            break
        between()
        pushed = time.perf_counter()
        values = push()
        rows.append({"s": time.perf_counter() - pushed, **values})
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _join(folder: str, rank: int, size: int) -> Any:
    """A process group as distcollect makes it, except for the store."""
    store = dist.FileStore(f"{folder}/store", size)
    kind = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=LOOPBACK, lazy_init=True)]
    return kind(store, rank, size, options)


def _broadcast(group: Any, flat: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([flat], options).wait()


def _serve_broadcast(pipe: Any, folder: str, rank: int, size: int, num_bytes: int) -> None:
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    group = _join(folder, rank, size)
    while pipe.recv() == "next":
        pipe.send("ready")
        _broadcast(group, flat)
        pipe.send("here")
