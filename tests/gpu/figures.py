"""Measures what a GPU costs and brings; prints one JSON object. Part of tests/gpu/run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import distcollect as dc
from distcollect.policy.live_weights import LiveWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.gpu_policies import Where

REPEATS = 7
Values = dict[str, Any]


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--out", type=Path, help="a file for the figures, written after each")
    given = parser.parse_args()
    device = torch.device(given.device)
    num_bytes = int(given.megabytes * 1e6)
    figures: dict[str, Callable[[], Values]] = {
        "push": lambda: pushes(device, num_bytes),
        "pause of the engine": lambda: pause(device, num_bytes),
    }
    found: Values = {}
    for name, measure in figures.items():
        begin = time.monotonic()
        try:
            values = measure()
        except Exception:  # noqa: BLE001 - the others count all the same
            values = {"failed": traceback.format_exc(limit=-4)}
        found[name] = {**values, "took_s": round(time.monotonic() - begin, 1)}
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


class PretendGpus(dc.BroadcastUpdater):
    """Takes each worker's GPU for one that no other has."""

    def attach(self, context: Any) -> None:
        super().attach(context)
        names = {worker_id: f"GPU of worker {worker_id}" for worker_id in range(64)}
        self._context = replace(context, gpus=names if torch.cuda.is_available() else {})


def name_host() -> None:
    """Let NCCL take this process for one on a host of its own."""
    os.environ["NCCL_HOSTID"] = str(os.getpid())


def pushes(device: torch.device, num_bytes: int) -> Values:
    """Medians of a push, to one worker and to two, by each backend."""
    values: Values = {}
    backends: dict[str, Any] = {
        "auto": dc.AutoUpdater,
        "gloo": partial(dc.BroadcastUpdater, "gloo"),
    }
    if device.type == "cuda":
        name_host()
        backends["nccl"] = partial(PretendGpus, "nccl")
    for (name, make), num_workers in itertools.product(backends.items(), (1, 2)):
        policy = Where(num_floats=num_bytes // 4).to(device)
        timings: dict[str, list[float]] = {}
        with dc.RPCDataCollector(
            "CartPole-v1",
            policy,
            num_workers=num_workers,
            frames_per_batch=4 * num_workers,
            sync=True,
            init_fn=name_host,
            weight_updater=make(),
        ) as collector:
            collector.next()
            for version in range(REPEATS + 1):
                handle = collector.update_policy_weights_(policy.fill(version))
                assert handle is not None
                assert not handle.left_out, handle.left_out
                for part, took in handle.timings.items():
                    timings.setdefault(part, []).append(took * 1e3)
        values[f"{name}, {num_workers} worker(s)"] = {
            f"{part[:-2]}_ms": round(statistics.median(took[1:]), 1)
            for part, took in timings.items()
        }
    return values


def pause(device: torch.device, num_bytes: int) -> Values:
    """How long the engine stops to take new weights in."""
    live = LiveWeights(Where(num_floats=num_bytes // 4).to(device))
    times = []
    for version in range(1, REPEATS + 2):
        live.commit(live.spare(), version)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        live.apply()
        times.append((time.perf_counter() - begin) * 1e3)
    return {"median_ms": round(statistics.median(times[1:]), 3), "longest_ms": round(max(times), 3)}


if __name__ == "__main__":
    main()
