"""The token shows in no command line, log or environment of a run; local workers need no port."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from helpers.descendants import descendants
from helpers.judge_launches import listening_ports
from helpers.policies import GreedyPolicy

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


def test_nothing_listens_for_local_workers() -> None:
    """Nobody else can connect to what is not there; rollouts and weights go all the same."""
    before = listening_ports(os.getpid())
    policy = GreedyPolicy()
    with dc.MultiaSyncDataCollector(
        "CartPole-v1", policy, frames_per_batch=8, num_workers=2
    ) as collector:
        assert collector.update_policy_weights_(policy).acknowledged == {0: 1, 1: 1}
        collector.next()
        assert listening_ports(os.getpid()) == before
        workers = descendants(os.getpid())
        assert len(workers) >= 3  # with their zygote
        assert [listening_ports(pid) for pid in workers] == [[]] * len(workers)
