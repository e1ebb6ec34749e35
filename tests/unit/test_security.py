"""Where a token may come from, and which addresses may be listened at."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch.distributed as dist

import distcollect as dc
from distcollect.launch.rendezvous import ListenSpec, listen_spec, read_token
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.interfaces import check_not_public, listen, same_address
from distcollect.net.messages import Spawn, TrainerAddress, WorkerBoot, WorkerSettings

SECRET = "e9d1a2-nobody-may-see-this"


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


@pytest.mark.parametrize("name", ["DISTCOLLECT_TOKEN", "DISTCOLLECT_TOKEN_FILE"])
def test_a_short_token_brings_one_warning(
    token_file: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token_file.write_text("short")
    if name == "DISTCOLLECT_TOKEN":
        monkeypatch.delenv("DISTCOLLECT_TOKEN_FILE")
        monkeypatch.setenv(name, "short")
    assert [read_token(), read_token()] == ["short"] * 2
    [record] = caplog.records
    assert record.message.startswith(name)
    assert "a token of 5 characters can be guessed" in record.message


def test_a_token_file_that_is_no_text(token_file: Path) -> None:
    token_file.write_bytes(b"\xff\xfe")
    with pytest.raises(dc.LaunchError, match="DISTCOLLECT_TOKEN_FILE"):
        read_token()


def test_the_token_is_in_no_text_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCOLLECT_TOKEN", SECRET)
    address, wanted = TrainerAddress("host", 1, SECRET), Spawn(0, 0, WorkerSettings(), {})
    assert SECRET not in f"{address} {ListenSpec('host', 1, SECRET)} {WorkerBoot(wanted, address)}"
    with pytest.raises(dc.LaunchError) as raised:
        Launch.detect({**os.environ, "TORCHELASTIC_RUN_ID": "run", "RANK": "no number"})
    assert SECRET not in str(raised.value)


def test_a_token_that_can_be_guessed_brings_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On one host too: all users of that host reach its loopback interface."""
    for name in ("DISTCOLLECT_TOKEN", "DISTCOLLECT_TOKEN_FILE", "DISTCOLLECT_LISTEN"):
        monkeypatch.delenv(name, raising=False)
    launch = Launch(Launcher.SLURM, world_size=3, run_id="slurm-7-0", master=("here", 20_000))
    assert listen_spec(launch).token == "slurm-7-0"
    assert "every user of the cluster can see" in caplog.text
    assert "DISTCOLLECT_TOKEN_FILE" in caplog.text
    caplog.clear()
    monkeypatch.setenv("DISTCOLLECT_TOKEN", SECRET)
    assert listen_spec(launch).token == SECRET
    assert not caplog.records


def test_torchruns_store_has_no_token_of_the_users() -> None:
    """Whoever reaches it can read it, and the other ranks have the token anyway."""
    store = dist.HashStore()
    ListenSpec("10.0.0.5", 0, SECRET, store, is_users_token=True).announce(4711)
    assert SECRET.encode() not in store.get("distcollect/trainer")
    ListenSpec("10.0.0.5", 0, SECRET, store).announce(4711)  # a random token: the ranks need it
    assert SECRET.encode() in store.get("distcollect/trainer")


@pytest.mark.parametrize("value", ["", "0", "no", "yes"])
def test_only_1_allows_public_addresses(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCOLLECT_ALLOW_PUBLIC", value)
    for address in ("8.8.8.8", "::ffff:8.8.8.8", "2606:4700::1111"):
        with pytest.raises(dc.LaunchError, match=f"public address {address}.*ALLOW_PUBLIC"):
            listen(address)
    monkeypatch.setenv("DISTCOLLECT_ALLOW_PUBLIC", "1")
    with pytest.raises(dc.LaunchError, match="can't listen"):  # allowed, but on no interface here
        listen("8.8.8.8")
    for address in ("10.1.2.3", "192.168.0.1", "100.64.0.1", "fd00::1", "fe80::1%eth0", "::1"):
        monkeypatch.delenv("DISTCOLLECT_ALLOW_PUBLIC", raising=False)
        check_not_public(address)


def test_same_address() -> None:
    assert same_address("fd00:0::5", "fd00::5")
    assert same_address("127.0.0.1", "127.0.1.1")
    assert same_address("::ffff:10.0.0.5", "10.0.0.5")
    assert not same_address("10.0.0.5", "10.0.0.6")
