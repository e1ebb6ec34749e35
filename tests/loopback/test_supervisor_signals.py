"""Signals that reach a supervisor, and what is left of its handlers."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.supervisor import _Signals, _Terminated, supervise
from distcollect.launch.worker_hosts import WorkerHosts
from distcollect.launch.zygote import ZYGOTE
from distcollect.net.messages import TrainerAddress

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def test_handlers_are_as_before_when_the_trainer_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ZYGOTE, "off")  # no worker will be started
    before = [signal.getsignal(number) for number in NUMBERS]
    hosts = WorkerHosts("127.0.0.1", "secret", num_ranks=1)
    address = TrainerAddress("127.0.0.1", hosts.join_server.port, "secret")
    closing = threading.Thread(target=hosts.close)
    closing.start()  # waits for the rank to join, then says goodbye
    supervise(lambda: address, rank=1, placement=CpuPlacement(None, 1), timeout_s=60)
    closing.join(60)
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_processes_are_ended_is_not_lost(number: int) -> None:
    with _Signals() as signals:
        with pytest.raises(_Terminated):
            os.kill(os.getpid(), number)
        signals.hold()
        os.kill(os.getpid(), number)
        with pytest.raises(_Terminated) as caught:
            signals.release()
        assert caught.value.args == (number,)
        signals.release()  # once
