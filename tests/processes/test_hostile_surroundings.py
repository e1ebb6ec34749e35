"""Workers run where a batch system, the system, or the user's folder is in their way."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.descendants import descendants
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.programs import run_python
from helpers.waiting import eventually, stop_process

from distcollect.common.process_exit import ProcessExit
from distcollect.launch import local_processes, zygote
from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.local_processes import LocalProcesses, ProcessEvents
from distcollect.net.messages import Spawn, TrainerAddress, WorkerSettings

WAIT_S = 120
REAP_S = 4.0


@pytest.fixture
def fresh_zygote() -> Iterator[None]:
    zygote.close()
    yield
    zygote.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86_64")
def test_workers_start_where_the_kernel_refuses_memory_files(marked: Marked) -> None:
    done = run_python(SCRIPTS / "collect_in_sandbox.py", timeout_s=WAIT_S)
    assert done.stdout == "frames: 32\n", done.stderr
    assert marked.gone(), marked.left()


class Exits(ProcessEvents):
    """Counts the exits that are reported."""

    def __init__(self) -> None:
        self.count = 0

    def exited(self, worker_id: int, incarnation: int, process_exit: ProcessExit) -> None:
        self.count += 1


@pytest.mark.usefixtures("fresh_zygote")  # whose workers have the mark
@pytest.mark.parametrize("stopped", ["zygote", "guards"])
def test_all_end_within_one_time_limit_though_the_zygote_or_their_guards_hang(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    monkeypatch.setattr(local_processes, "REAP_TIMEOUT_S", REAP_S)
    exits = Exits()
    processes = LocalProcesses(exits)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = TrainerAddress("127.0.0.1", silent.getsockname()[1], "")
        for worker_id in range(4):
            wanted = Spawn(worker_id, 0, WorkerSettings(), {})
            processes.spawn(wanted, trainer, CpuPlacement(None, 1))
        pid = zygote.pid()
        assert pid is not None
        eventually(lambda: len(descendants(pid)) == 8, WAIT_S)  # with the guards
        guards = [each for each in descendants(pid) if parent_of(each) == pid]
        for hanging in [pid] if stopped == "zygote" else guards:
            stop_process(hanging)
        began = time.monotonic()
        processes.close(0)
        took = time.monotonic() - began
    assert exits.count == 4
    assert marked.gone(), marked.left()
    assert took < 3 * REAP_S
