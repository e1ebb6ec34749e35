"""What keeps strangers out, and secrets in."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
import torch.distributed as dist

import distcollect as dc
from distcollect.launch.rendezvous import ListenSpec, TrainerAddress
from distcollect.launch.topology import Launch
from distcollect.launch.worker_hosts import read_token
from distcollect.net.client import ControlConnection
from distcollect.net.framing import Message
from distcollect.net.interfaces import check_not_public, same_address
from distcollect.net.server import Connection, JoinServer, JoinServerEvents

SECRET = "e9d1a2-nobody-may-see-this"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("DISTCOLLECT_TOKEN_FILE", str(path))
    return path


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o620])
def test_a_token_that_others_may_read_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(dc.LaunchError, match=r"others may read or change it.*chmod 600") as raised:
        read_token()
    assert SECRET not in str(raised.value)
    assert stat.filemode(stat.S_IFREG | mode) in str(raised.value)


def test_a_token_of_a_group(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_token() == SECRET
    assert not caplog.records
    token_file.chmod(0o640)
    assert read_token() == SECRET
    assert "its group may read it" in caplog.text


def test_a_token_file_that_is_no_text(token_file: Path) -> None:
    token_file.write_bytes(b"\xff\xfe")
    with pytest.raises(dc.LaunchError, match="DISTCOLLECT_TOKEN_FILE"):
        read_token()


def command_lines() -> str:
    """What ``ps`` shows of all processes."""
    lines = []
    for folder in Path("/proc").iterdir():
        try:
            lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def test_the_token_shows_nowhere(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in ps, not in a log, not in a worker's environment."""
    caplog.set_level(logging.DEBUG, "distcollect")
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1) as collector:
        collector.next()
        [process] = collector._session.workers._processes.values()
        assert process.connection is not None
        pid = process.connection.hello["pid"]
        assert "json.loads" in Path(f"/proc/{pid}/cmdline").read_text()  # that's it
        assert SECRET not in command_lines()
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert SECRET not in str(process.connection.hello)
    assert SECRET not in caplog.text


def test_the_token_is_in_no_text_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCOLLECT_TOKEN", SECRET)
    assert SECRET not in f"{TrainerAddress('host', 1, SECRET)} {ListenSpec('host', 1, SECRET)}"
    with pytest.raises(dc.LaunchError) as raised:
        Launch.detect({**os.environ, "TORCHELASTIC_RUN_ID": "run", "RANK": "no number"})
    assert SECRET not in str(raised.value)


def test_torchruns_store_has_no_token_of_the_users() -> None:
    """Whoever reaches it can read it, and the other ranks have the token anyway."""
    store = dist.HashStore()
    ListenSpec("10.0.0.5", 0, SECRET, store, is_own_token=True).announce(4711)
    assert SECRET.encode() not in store.get("distcollect/gate")
    ListenSpec("10.0.0.5", 0, SECRET, store).announce(4711)  # drawn at random: they need it
    assert SECRET.encode() in store.get("distcollect/gate")


@pytest.mark.parametrize("versions", ["right", "wrong"])
def test_a_peers_token_is_not_kept(versions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer said of itself is logged, and shown in errors."""
    told: list[Message] = []

    class Events(JoinServerEvents):
        def admit(self, connection: Connection) -> Message:
            told.append(connection.hello)
            return {}

        def refused(self, hello: Message, reason: str) -> None:
            told.append(hello)

    gate = JoinServer("127.0.0.1", SECRET, Events())
    try:
        lifeline = ControlConnection("127.0.0.1", gate.port, 10)
        if versions == "wrong":
            monkeypatch.setattr("distcollect.net.framing.versions", lambda: {"torch": "0.4"})
        if versions == "right":
            lifeline.join("worker", SECRET)
        else:
            lifeline.send({"role": "worker", "token": SECRET, "versions": {}, "host": "here"})
            assert lifeline.receive() is not None
        lifeline.close()
    finally:
        gate.close()
    assert [hello["role"] for hello in told] == ["worker"]
    assert SECRET not in str(told)


@pytest.mark.parametrize("value", ["", "0", "no", "yes"])
def test_only_1_allows_public_addresses(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCOLLECT_ALLOW_PUBLIC", value)
    for address in ("8.8.8.8", "::ffff:8.8.8.8", "2606:4700::1111"):
        with pytest.raises(dc.LaunchError, match="public address"):
            check_not_public(address)
    monkeypatch.setenv("DISTCOLLECT_ALLOW_PUBLIC", "1")
    check_not_public("8.8.8.8")
    for address in ("10.1.2.3", "192.168.0.1", "100.64.0.1", "fd00::1", "fe80::1%eth0", "::1"):
        monkeypatch.delenv("DISTCOLLECT_ALLOW_PUBLIC", raising=False)
        check_not_public(address)


def test_same_address() -> None:
    assert same_address("fd00:0::5", "fd00::5")
    assert same_address("127.0.0.1", "127.0.1.1")
    assert same_address("::ffff:10.0.0.5", "10.0.0.5")
    assert not same_address("10.0.0.5", "10.0.0.6")
