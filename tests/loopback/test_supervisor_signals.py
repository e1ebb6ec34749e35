"""Signals that reach a supervisor, and what is left of its handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.local_processes import LocalProcesses
from distcollect.launch.supervisor import supervise
from distcollect.launch.worker_hosts import WorkerHosts
from distcollect.launch.zygote import ZYGOTE
from distcollect.net.messages import TrainerAddress

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_handlers_are_as_before_and_no_signal_is_lost_while_processes_are_ended(
    monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    monkeypatch.setenv(ZYGOTE, "off")  # no worker will be started
    if number is not None:
        monkeypatch.setattr(LocalProcesses, "close", lambda *_: os.kill(os.getpid(), number))
    before = [signal.getsignal(number) for number in NUMBERS]
    hosts = WorkerHosts("127.0.0.1", "secret", num_ranks=1)
    address = TrainerAddress("127.0.0.1", hosts.join_server.port, "secret")
    closing = threading.Thread(target=hosts.close)
    closing.start()  # waits for the rank to join, then says goodbye
    ends = (
        contextlib.nullcontext()
        if number is None
        else pytest.raises(SystemExit, match=str(128 + number))
    )
    with ends:
        supervise(lambda: address, rank=1, placement=CpuPlacement(None, 1), timeout_s=60)
    closing.join(60)
    assert [signal.getsignal(number) for number in NUMBERS] == before
