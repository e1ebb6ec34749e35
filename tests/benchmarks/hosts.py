"""Pushing weights to two workers on another host, and getting their rollouts, by each transport.

The host is a network namespace of this machine, so this needs root. Over RPC Gloo broadcasts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers.hosts import Hosts
from helpers.waiting import eventually
from torch import nn

import distcollect as dc
from benchmarks.items import Values
from benchmarks.workloads import SleepingEnv

_HOST, _REMOTE, _JOIN_S = 2, (1, 2), 60.0
_FEWEST = 6  # pushes by each
_WAYS = {"gloo": ("rpc", None), "tcp": ("tcp", "token"), "tls": ("tcp", "tls")}


class _Weights(nn.Module):
    """As many bytes of weights, of which it needs none."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)


def run_pushes(seconds: float, *, num_bytes: int) -> Values:
    """Return milliseconds for a push, and of Gloo's time over that of each other way the median."""
    policy = _Weights(num_bytes)
    with _collectors(policy, frames_per_batch=2, sync=True) as (_, collectors):
        times: dict[str, list[float]] = {way: [] for way in _WAYS}
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(times["gloo"]) <= _FEWEST:
            for way, collector in collectors.items():
                times[way].append(_push_s(collector, policy))
    times = {way: each[1:] for way, each in times.items()}  # the first one makes buffers
    values = {f"{way}_ms": 1e3 * statistics.median(each) for way, each in times.items()}
    for way in _WAYS:
        ratios = [gloo / own for gloo, own in zip(times["gloo"], times[way], strict=True)]
        values[f"{way}_speed_ratio"] = statistics.median(ratios)
    return values


def run_link(seconds: float, *, delay_ms: float) -> Values:
    """Return the frames/s of the other host, and their ratio to RPC's, over a slow link.

    The envs sleep: both hosts have the cores of this machine, where a worker that is served sooner
    takes them from the others.
    """
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    with _collectors(None, create_env_fn=SleepingEnv, frames_per_batch=8) as (hosts, collectors):
        hosts.do(_HOST, "slow", "--delay-ms", str(delay_ms))
        for _ in range(1 + _FEWEST):
            for way, collector in collectors.items():
                found[way].append(_remote_frames_per_s(collector, seconds / _FEWEST))
    found = {way: each[1:] for way, each in found.items()}
    values = {f"{way}_frames_per_s": statistics.median(each) for way, each in found.items()}
    for way in _WAYS:
        ratios = [own / rpc for own, rpc in zip(found[way], found["gloo"], strict=True)]
        values[f"{way}_ratio"] = statistics.median(ratios)
    return values


@contextlib.contextmanager
def _collectors(
    policy: nn.Module | None, **options: Any
) -> Iterator[tuple[Hosts, dict[str, dc.RPCDataCollector]]]:
    """The hosts, and for each way a collector with a worker here and two there."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["DISTCOLLECT_TOKEN_FILE"] = str(token)
        hosts = stack.enter_context(Hosts())
        path = os.pathsep.join(filter(None, sys.path))  # of the policy's module
        env = {**os.environ, **hosts.env, "PYTHONPATH": path}
        worker = [*hosts.on(_HOST), sys.executable, "-m", "distcollect", "worker", "--threads=1"]
        collectors = {}
        for port, (way, (transport, security)) in enumerate(_WAYS.items(), start=29600):
            collector = collectors[way] = stack.enter_context(
                dc.RPCDataCollector(
                    policy=policy,
                    num_workers=1,
                    listen=f"{hosts.address}:{port}",
                    transport=transport,
                    security=security,
                    **{"create_env_fn": "CartPole-v1", **options},
                )
            )
            for _ in _REMOTE:
                joins = [*worker, f"--join={hosts.address}:{port}"]
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                subprocess.Popen(joins, env=env, stdin=subprocess.DEVNULL, **quiet)
            eventually(lambda: collector.num_workers == 1 + len(_REMOTE), _JOIN_S)  # noqa: B023
        yield hosts, collectors


def _remote_frames_per_s(collector: dc.RPCDataCollector, seconds: float) -> float:
    num_frames, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        batch = collector.next()
        assert batch is not None
        if int(batch["collector", "worker_id"][0, 0]) in _REMOTE:
            num_frames += batch.numel()
    return num_frames / (time.monotonic() - began)


def _push_s(collector: dc.RPCDataCollector, policy: nn.Module) -> float:
    handle = collector.update_policy_weights_(policy, worker_ids=_REMOTE)
    assert handle is not None
    assert handle.acknowledged.keys() == {*_REMOTE}, handle
    return handle.timings["total_s"]
