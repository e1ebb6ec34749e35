"""What it takes to push weights to two workers on another host, by each transport, in turn.

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
from pathlib import Path

import torch
from helpers.hosts import Hosts
from helpers.waiting import eventually
from torch import nn

import distcollect as dc
from benchmarks.items import Values

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


def run(seconds: float, *, num_bytes: int) -> Values:
    """Return milliseconds for a push, and of Gloo's time over that of each other way the median."""
    policy = _Weights(num_bytes)
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
                    "CartPole-v1",
                    policy,
                    frames_per_batch=2,
                    sync=True,
                    num_workers=1,  # here; it is sent nothing
                    listen=f"{hosts.address}:{port}",
                    transport=transport,
                    security=security,
                )
            )
            for _ in _REMOTE:
                joins = [*worker, f"--join={hosts.address}:{port}"]
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                subprocess.Popen(joins, env=env, stdin=subprocess.DEVNULL, **quiet)
            eventually(lambda: collector.num_workers == 1 + len(_REMOTE), _JOIN_S)  # noqa: B023
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


def _push_s(collector: dc.RPCDataCollector, policy: nn.Module) -> float:
    handle = collector.update_policy_weights_(policy, worker_ids=_REMOTE)
    assert handle is not None
    assert handle.acknowledged.keys() == {*_REMOTE}, handle
    return handle.timings["total_s"]
