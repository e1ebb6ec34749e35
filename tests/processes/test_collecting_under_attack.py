"""Strangers attack the port where workers join, while a run collects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.bad_launches import free_port
from helpers.marked import Marked
from helpers.paths import SCRIPTS

import distcollect as dc

ATTACK_S = int(os.environ.get("ATTACK_S", "4"))
NUM_SILENT = 1000  # and half as many that begin a frame of 1 MiB


@pytest.mark.parametrize(
    ("security", "attack_s"),
    [
        (None, ATTACK_S),
        ("tls", ATTACK_S),
        pytest.param("tls", 120, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_no_frame_is_lost_to_strangers(
    monkeypatch: pytest.MonkeyPatch, marked: Marked, security: str | None, attack_s: int
) -> None:
    """And the trainer keeps a limited number of their connections."""
    monkeypatch.setenv("DISTCOLLECT_TOKEN", "e9d1a2")
    port = free_port()
    with dc.RPCDataCollector(
        "CartPole-v1",
        frames_per_batch=64,
        num_workers=2,
        listen=f"127.0.0.1:{port}",
        security=security,
        transport=security and "tcp",
    ) as collector:
        collector.next()
        command = [sys.executable, SCRIPTS / "attack_gate.py", port, attack_s, NUM_SILENT]
        command += [security] if security else []
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as attack:
            assert attack.stdout is not None
            assert attack.stdout.readline() == "silent\n"
            num_batches = num_files = 0
            while attack.poll() is None:
                assert collector.next().numel() == 64
                num_batches += 1
                num_files = max(num_files, len(list(Path("/proc/self/fd").iterdir())))
            num_connections = int(attack.stdout.readline())
        collector.next()
        frames = collector.ledger.total
    print(f"{num_connections} connections; {num_batches} batches; at most {num_files} open files")
    assert marked.gone(60), marked.left()
    assert frames.lost == {}
    assert frames.at_most == 0
    assert num_connections > 100
    assert num_batches > 0
    assert num_files < 1024 + 500
