"""Strangers attack the join server while a run collects."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.join_server import cpu_s
from helpers.paths import SCRIPTS

import distcollect as dc
from distcollect.net.client import ControlConnection
from distcollect.net.messages import WorkerHello

ATTACK_S = int(os.environ.get("ATTACK_S", "6"))
NUM_SILENT = 1000  # and half as many that begin a frame of 1 MiB
SECRET = "e9d1a2"


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


def join_as_nobody(port: int) -> float:
    """Prove the token as a worker that has no slot; return how long that took."""
    begin = time.monotonic()
    connection = ControlConnection("127.0.0.1", port, 30)
    try:
        with pytest.raises(dc.LaunchError, match="there is no free slot for it"):
            connection.join(WorkerHello(worker_id=99, incarnation=0), SECRET)
    finally:
        connection.close()
    return time.monotonic() - begin


def test_no_frame_is_lost_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the server's thread computes little, and keeps little of what they send."""
    monkeypatch.setenv("DISTCOLLECT_TOKEN", SECRET)
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=64, num_workers=2) as collector:
        server = collector._backend.workers._hosts.join_server
        for _ in range(20):
            collector.next()
        used, size, begin = cpu_s(), resident_mib(), time.monotonic()
        command = [sys.executable, str(SCRIPTS / "attack_gate.py"), str(server.port)]
        with subprocess.Popen(
            [*command, str(ATTACK_S), str(NUM_SILENT)], stdout=subprocess.PIPE, text=True
        ) as attack:
            assert attack.stdout is not None
            assert attack.stdout.readline() == "silent\n"
            joined_s = join_as_nobody(server.port)
            num_batches, highest, num_files = 0, size, 0
            while attack.poll() is None:
                assert collector.next().numel() == 64
                num_batches += 1
                highest = max(highest, resident_mib())
                num_files = max(num_files, len(list(Path("/proc/self/fd").iterdir())))
            num_connections = int(attack.stdout.readline())
        wall_s, busy_s = time.monotonic() - begin, cpu_s() - used
        for _ in range(20):
            collector.next()
        frames = collector.ledger.total
    print(
        f"{num_connections} connections beside {NUM_SILENT} silent ones in {wall_s:.1f} s; "
        f"{num_batches} batches; joined in {joined_s:.2f} s; the server's thread used "
        f"{100 * busy_s / wall_s:.1f}% of a core; {highest - size:+.1f} MiB; {num_files} open files"
    )
    assert frames.lost == {}
    assert frames.at_most == 0
    assert num_connections > 100
    assert num_batches > 0
    assert busy_s < 0.25 * wall_s + 1  # in fact some 3%
    assert highest - size < 64
    assert num_files < 1024 + 500
