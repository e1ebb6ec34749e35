"""Delivered bytes/s over a link of 100 Mbit/s, compared with a plain TCP transfer.

    python tests/helpers/scripts/measure_slow_link.py [MBIT]

As root: two hosts are network namespaces on this machine. Repeated three times, in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from chaos.hosts import Hosts  # noqa: E402 - it is beside the tests

REPEATS = 3
PORT = 4711
# What collect_on_hosts.py prints.
PAYLOAD = 32 * 40 * 64 * 1024

RECEIVE = f"""
import socket, time
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    sock, _ = server.accept()
    began, left = time.monotonic(), {PAYLOAD}
    while left:
        left -= len(sock.recv(min(left, 1 << 20)))
    print({PAYLOAD} / (time.monotonic() - began))
"""
SEND = f"""
import os, socket, sys
with socket.create_connection((sys.argv[1], {PORT})) as sock:
    sock.sendall(os.urandom({PAYLOAD}))
    sock.recv(1)
"""


def bare(hosts: Hosts, env: dict[str, str], address: str) -> float:
    """Bytes per second of a TCP connection that does nothing else."""
    receive = [*hosts.on(1), sys.executable, "-c", RECEIVE]
    with subprocess.Popen(receive, env=env, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run([*hosts.on(2), sys.executable, "-c", SEND, address], env=env, check=True)
        return float(receiver.stdout.read())


def delivered(hosts: Hosts, env: dict[str, str]) -> tuple[float, float]:
    """Bytes of observations per second at the trainer; bytes on the wire for each."""
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d")
    run = (sys.executable, "-m", "torch.distributed.run", *options)
    command = (*run, "--rdzv-endpoint=node1:29511", str(HERE / "collect_on_hosts.py"), "rate")
    ranks = [
        subprocess.Popen([*hosts.on(h), *command], env=env, stdout=subprocess.PIPE, text=True)
        for h in (1, 2)
    ]
    said, _ = ranks[0].communicate(timeout=120)
    ranks[1].communicate(timeout=60)
    [line] = [line for line in said.splitlines() if line.startswith('{"wire"')]
    seen = json.loads(line)
    return seen["payload_bytes_per_s"], seen["wire"]


def main() -> None:
    mbit = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with Hosts(HERE.parent / "testbed") as hosts:
        env = {**os.environ, **hosts.env}
        hosts.do(2, "rate", f"{mbit}mbit")
        network = hosts.address.rpartition(".")[0]
        ratios = []
        for _ in range(REPEATS):
            limit = bare(hosts, env, f"{network}.1")
            got, wire = delivered(hosts, env)
            ratios.append(got / limit)
            print(
                f"bare {limit / 1e6:.2f} MB/s, delivered {got / 1e6:.2f} MB/s: {ratios[-1]:.2f}; "
                f"{wire:.3f} bytes on the wire for each byte of an observation",
                flush=True,
            )
        print(f"median {statistics.median(ratios):.2f} at {mbit} Mbit/s")


if __name__ == "__main__":
    main()
