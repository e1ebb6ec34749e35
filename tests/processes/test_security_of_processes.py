"""The token shows in no command line, log or environment of a run; local workers need no port."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.bad_launches import free_port
from helpers.descendants import descendants
from helpers.judge_launches import listening_ports
from helpers.launching import start
from helpers.marked import Marked
from helpers.paths import TESTS
from helpers.policies import GreedyPolicy
from helpers.publishing import AsFromAfar
from helpers.waiting import eventually

import distcollect as dc

SECRET = "e9d1a2-nobody-may-see-this"


def test_the_token_shows_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in ps, not in a log, not in a worker's environment."""
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("DISTCOLLECT_TOKEN_FILE", str(path))
    caplog.set_level(logging.DEBUG, "distcollect")
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1) as collector:
        collector.next()
        shown = [
            Path(f"/proc/{pid}/{name}").read_bytes()
            for pid in descendants(os.getpid())
            for name in ("cmdline", "environ")
        ]
    assert any(b"distcollect.worker.main" in text for text in shown)  # the worker's is among them
    assert not any(SECRET.encode() in text for text in shown)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("updater", [None, dc.AutoUpdater, AsFromAfar])
@pytest.mark.parametrize("kind", [dc.MultiSyncDataCollector, dc.RPCDataCollector])
def test_nothing_listens_for_local_workers(
    kind: Any, updater: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else can connect to what is not there; rollouts and weights go all the same."""
    caplog.set_level(logging.INFO, "distcollect")
    before = listening_ports(os.getpid())
    policy = GreedyPolicy()
    given = {"num_workers": 2, "transport": "tcp", "weight_updater": updater}
    with kind("CartPole-v1", policy, frames_per_batch=8, **given) as collector:
        assert collector.update_policy_weights_(policy).acknowledged == {0: 1, 1: 1}
        collector.next()
        assert listening_ports(os.getpid()) == before
        workers = descendants(os.getpid())
        assert len(workers) >= 3  # with their zygote
        assert [listening_ports(pid) for pid in workers] == [[]] * len(workers)
    assert caplog.text.count("listens") == caplog.text.count("nothing listens for workers") == 1


def test_one_port_listens_for_workers_of_other_hosts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    marked: Marked,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That by which they join: neither they nor the trainer open another for weights."""
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(SECRET)
    caplog.set_level(logging.INFO, "distcollect")
    monkeypatch.setenv("DISTCOLLECT_SECURITY", "tls")
    monkeypatch.setenv("DISTCOLLECT_TOKEN_FILE", str(path))
    before, port, policy = listening_ports(os.getpid()), free_port(), GreedyPolicy()
    given = {"num_workers": 1, "transport": "tcp", "weight_updater": AsFromAfar}
    address = f"127.0.0.1:{port}"
    with dc.RPCDataCollector(
        "CartPole-v1", policy, frames_per_batch=8, listen=address, **given
    ) as collector:
        command = [sys.executable, "-m", "distcollect", "worker", "--join", address]
        start(command, PYTHONPATH=str(TESTS))
        eventually(lambda: collector.num_workers == 2)
        assert collector.update_policy_weights_(policy).acknowledged == {0: 1, 1: 1}
        collector.next()
        assert listening_ports(os.getpid()) == sorted([*before, port])
        others = descendants(os.getpid())
        assert len(others) >= 5  # two zygotes, a supervisor, two workers
        assert [listening_ports(pid) for pid in others] == [[]] * len(others)
    assert (
        f"join at {address}; who knows the token may connect; TLS 1.3 encrypts all" in caplog.text
    )
