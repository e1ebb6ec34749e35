"""Measures what a GPU costs and brings; prints one JSON object. Part of tests/gpu/run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import distcollect as dc
from distcollect.policy.live_weights import LiveWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.gpu_policies import Where

REPEATS = 7
Values = dict[str, Any]


def main() -> None:
    """Measure all, or be a member of the raw broadcast."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--out", type=Path, help="a file for the figures, written after each")
    parser.add_argument("--one-gpu", action="store_true", help="members share one, if NCCL can")
    parser.add_argument("--member", nargs=2, type=int, metavar=("RANK", "PORT"))
    given = parser.parse_args()
    device = torch.device(given.device)
    num_bytes = int(given.megabytes * 1e6)
    if given.member:
        be_member(*given.member, device, num_bytes, one_gpu=given.one_gpu)
        return
    figures: dict[str, Callable[[], Values]] = {
        "raw broadcast": lambda: raw_broadcast(device, num_bytes),
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


def synchronize(device: torch.device) -> None:
    """Wait for what the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """The median time of ``work``, in ms, until the device has done it; the first is left out."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return round(statistics.median(times[1:]), 3)


def raw_broadcast(device: torch.device, num_bytes: int, *, one_gpu: bool = False) -> Values:
    """torch.distributed.broadcast between two processes, with nothing of this package."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable, __file__, "--device", device.type, "--megabytes", str(num_bytes / 1e6),
        *(["--one-gpu"] if one_gpu else []), "--member",
    ]  # fmt: skip
    members = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NCCL_HOSTID": f"host {rank}"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [member.communicate(timeout=60)[0] for member in members]
    except subprocess.TimeoutExpired:
        return {"failed": "the members did not end within 60 s"}
    finally:
        for member in members:
            member.kill()
            member.communicate()
    if any(member.returncode for member in members):
        return {"failed": outputs[0][-1500:] + outputs[1][-1500:]}
    # Torch and NCCL may write lines of their own, also at the end.
    found = next(line for line in outputs[0].splitlines() if line.startswith("{"))
    values: Values = json.loads(found)
    return values


def be_member(rank: int, port: int, device: torch.device, num_bytes: int, *, one_gpu: bool) -> None:
    """A member of the raw broadcast; rank 0 prints how long it took."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1 and not one_gpu
    if several:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist: Any = torch.distributed
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    took = median_ms(lambda: (dist.broadcast(flat, 0), dist.barrier()), device)
    empty = median_ms(dist.barrier, device)
    if rank == 0:
        way = "a GPU each" if several else "one GPU, through sockets"
        print(
            json.dumps(
                {
                    "backend": backend,
                    "between": way if backend == "nccl" else "CPUs",
                    "broadcast_ms": round(took - empty, 3),
                }
            )
        )
    dist.destroy_process_group()


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
        synchronize(device)
        begin = time.perf_counter()
        live.apply()
        times.append((time.perf_counter() - begin) * 1e3)
    return {"median_ms": round(statistics.median(times[1:]), 3), "longest_ms": round(max(times), 3)}


if __name__ == "__main__":
    main()
