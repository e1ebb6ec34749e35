"""What it takes to request a rollout and fetch it, over each transport, between two processes.

No memory is mapped, and RPC doesn't read it either: as between hosts, all goes through sockets.
Beside them two processes that do no more than send as many bytes through a socket, also with TLS.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from helpers.light_workers import Light, collect_all
from helpers.loopback_transport import answer_of
from helpers.rpc_world import Rpc
from helpers.transport_contract import SOON_S, Tcp, Tls

from benchmarks.items import Values
from distcollect.common.peer_ids import identity
from distcollect.net.tls import trainer_tls
from distcollect.transport import rpc_agents
from distcollect.transport.protocol import CollectRequest

_TURNS = 5
_LIGHT_BYTES = 3_700


def run(seconds: float, *, num_bytes: int) -> Values:
    """Return microseconds for each rollout, and of these the CPU time of this process.

    The transports take turns. The lowest of several windows counts: others use this machine too.
    """
    rpc_agents.CHANNELS = ["mpt_uv", "basic"]
    worlds: dict[str, Any] = {"rpc": Rpc(), "tcp": Tcp(), "tls": Tls()}
    fetches: dict[str, Callable[[], object]] = {
        name: lambda world=world: answer_of(world.offered(1, frames=num_bytes).fetch).result(SOON_S)
        for name, world in worlds.items()
    }
    for name, has_tls in (("socket", False), ("ssl", True)):
        worlds[name] = _Bare(num_bytes, has_tls=has_tls)
        fetches[name] = worlds[name].fetch
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in worlds}
    try:
        for _ in range(1 + _TURNS):
            for name, fetch in fetches.items():
                found[name].append(_window(fetch, seconds / _TURNS))
    finally:
        for world in worlds.values():
            world.close()
    values: Values = {}
    for name, windows in found.items():
        wall_us, cpu_us = zip(*windows[1:], strict=True)  # the first one makes buffers
        values |= {f"{name}_us": min(wall_us), f"{name}_cpu_us": min(cpu_us)}
    values["tcp_speed_ratio"] = values["socket_us"] / values["tcp_us"]
    values["tls_speed_ratio"] = values["ssl_us"] / values["tls_us"]
    return values


def run_light(seconds: float, *, num_workers: int) -> Values:
    """Return the same CPU time where so many workers are asked together, by each transport.

    They are threads of one process over TCP; RPC reaches one process by so many connections.
    """
    rpc = Rpc()
    address = rpc.transport.address_of(rpc.peer)
    peers = [rpc.peer, *(identity().new_peer() for _ in range(num_workers - 1))]
    for peer in peers[1:]:
        rpc.transport.connect(peer, address)
    tcp, tls = Light(num_workers, "token"), Light(num_workers, "tls")
    worlds = {"rpc": (rpc, peers), "tcp": (tcp, tcp.peers), "tls": (tls, tls.peers)}
    request = CollectRequest(1, frames=_LIGHT_BYTES)
    found: dict[str, list[float]] = {name: [] for name in worlds}
    try:
        for _ in range(1 + _TURNS):
            for name, (world, all_peers) in worlds.items():
                collect = partial(collect_all, world.transport, all_peers, request)
                _, cpu_us = _window(collect, seconds / _TURNS)
                found[name].append(cpu_us / num_workers)
    finally:
        for world, _ in worlds.values():
            world.close()
    values = {f"{name}_cpu_us": min(windows[1:]) for name, windows in found.items()}
    return values | {"cpu_ratio": values["tcp_cpu_us"] / values["rpc_cpu_us"]}


class _Bare:
    """Another process that sends so many bytes whenever it gets one."""

    def __init__(self, num_bytes: int, *, has_tls: bool) -> None:
        self._buffer = memoryview(bytearray(num_bytes))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            args = (listener.getsockname()[1], num_bytes, has_tls)
            self._process = multiprocessing.get_context("spawn").Process(target=_send, args=args)
            self._process.start()
            self._sock: Any = listener.accept()[0]
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if has_tls and (tls := trainer_tls("127.0.0.1", "tls")):
            self._sock = tls.context.wrap_socket(self._sock, server_side=True)

    def fetch(self) -> None:
        self._sock.sendall(b"x")
        missing = self._buffer
        while missing:
            missing = missing[self._sock.recv_into(missing) :]

    def close(self) -> None:
        self._sock.close()
        self._process.join(SOON_S)


def _send(port: int, num_bytes: int, has_tls: bool) -> None:
    data = b"x" * num_bytes  # bytes(num_bytes) is one page of zeros, which stays in the cache
    sock: Any = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if has_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    while sock.recv(1):
        sock.sendall(data)


def _window(fetch: Callable[[], object], seconds: float) -> tuple[float, float]:
    count, began, used = 0, time.perf_counter(), _cpu_s()
    while time.perf_counter() < began + seconds:
        fetch()
        count += 1
    return (time.perf_counter() - began) / count * 1e6, (_cpu_s() - used) / count * 1e6


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
