"""What it takes to request a rollout and fetch it, over each transport, between two processes.

No memory is mapped, and RPC doesn't read it either: as between hosts, all goes through sockets.
"""

from __future__ import annotations

import resource
import time
from typing import Any

from helpers.loopback_transport import answer_of
from helpers.rpc_world import Rpc
from helpers.scripts.transport_peer import rollout
from helpers.transport_contract import SOON_S, Tcp, Tls

from benchmarks.items import Values
from distcollect.transport import rpc_agents

_TURNS = 5


def run(seconds: float, *, num_bytes: int) -> Values:
    """Return microseconds for each rollout, and of these the CPU time of this process.

    The transports take turns. The lowest of several windows counts: others use this machine too.
    """
    rpc_agents.CHANNELS = ["mpt_uv", "basic"]
    worlds = {"rpc": Rpc(), "tcp": Tcp(), "tls": Tls()}
    num_steps = num_bytes // (sum(tensor.nbytes for tensor in rollout(1000)) // 1000)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in worlds}
    try:
        for _ in range(1 + _TURNS):
            for name, world in worlds.items():
                found[name].append(_window(world, num_steps, seconds / _TURNS))
    finally:
        for world in worlds.values():
            world.close()
    values: Values = {}
    for name, windows in found.items():
        wall_us, cpu_us = zip(*windows[1:], strict=True)  # the first one makes buffers
        values |= {f"{name}_us": min(wall_us), f"{name}_cpu_us": min(cpu_us)}
    return values


def _window(world: Any, num_steps: int, seconds: float) -> tuple[float, float]:
    count, began, used = 0, time.perf_counter(), _cpu_s()
    while time.perf_counter() < began + seconds:
        answer_of(world.offered(num_steps).fetch).result(SOON_S)
        count += 1
    return (time.perf_counter() - began) / count * 1e6, (_cpu_s() - used) / count * 1e6


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
