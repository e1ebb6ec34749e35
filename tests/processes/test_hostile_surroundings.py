"""Workers run where a batch system, the system, or the user's folder is in their way."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from helpers.descendants import descendants, signal_all
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.programs import run_python
from helpers.waiting import eventually, stop_process

import distcollect as dc
from distcollect.common.process_exit import ProcessExit
from distcollect.launch import local_processes, zygote
from distcollect.launch.local_processes import LocalProcesses, ProcessEvents
from distcollect.net.messages import TrainerAddress, WorkerBoot

WAIT_S = 120
REAP_S = 4.0


class Telling(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that tells of its process."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def process(self) -> tuple[int, int]:
        """Its id, and how many threads torch uses."""
        return os.getpid(), torch.get_num_threads()


def collect(num_workers: int) -> dc.MultiSyncDataCollector:
    return dc.MultiSyncDataCollector(
        [Telling] * num_workers, None, frames_per_batch=16 * num_workers
    )


def pids(collector: dc.MultiSyncDataCollector) -> dict[int, int]:
    return {worker_id: pid for worker_id, [(pid, _)] in collector.call("process").items()}


@pytest.fixture
def fresh_zygote() -> Iterator[None]:
    zygote.close()
    yield
    zygote.close()


@pytest.fixture
def sigchld_is_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("use", ["keep", "off"])
@pytest.mark.usefixtures("sigchld_is_ignored")
def test_signals_to_all_processes_and_a_death_concern_no_other_worker(
    monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.setenv(zygote.ZYGOTE, use)
    with collect(2) as collector:
        collector.next()
        before, first_zygote = pids(collector), zygote.pid()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
            signal_all(os.getpid(), number)
        assert collector.next().numel() == 32
        assert pids(collector) == before
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: pids(collector).get(1) not in {None, before[1]}, WAIT_S)
        assert collector.next().numel() == 32
        assert pids(collector)[0] == before[0]
        assert zygote.pid() == first_zygote


@pytest.mark.usefixtures("fresh_zygote")
def test_workers_start_without_the_newer_functions_of_os(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in builds of Python for an old libc."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create, os.pidfd_open\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    with collect(2) as collector:
        assert collector.next().numel() == 32
        parents = {parent_of(parent_of(pid)) for pid in pids(collector).values()}
        assert parents == {zygote.pid()}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86_64")
def test_workers_start_where_the_kernel_refuses_memory_files(marked: Marked) -> None:
    done = run_python(SCRIPTS / "collect_in_sandbox.py", timeout_s=WAIT_S)
    assert done.stdout == "frames: 32\n", done.stderr
    assert marked.gone(), marked.left()


def test_workers_start_though_all_streams_are_closed(marked: Marked, tmp_path: Path) -> None:
    script, result = SCRIPTS / "collect_without_streams.py", tmp_path / "result"
    command = f"exec {sys.executable} {script} {result} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=WAIT_S, check=False).returncode == 0
    assert result.read_text() == "32 frames, zygote: True"
    assert marked.gone(), marked.left()


@pytest.mark.usefixtures("fresh_zygote")
def test_a_number_of_threads_that_openmp_ignores_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "auto")
    with collect(1) as collector:
        assert collector.next().numel() == 16
        [[(_, num_threads)]] = collector.call("process").values()
        assert num_threads == 1


@pytest.mark.parametrize("use", ["keep", "off"])
@pytest.mark.usefixtures("fresh_zygote")
def test_modules_in_the_working_folder_do_not_replace_pythons_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, use: str
) -> None:
    monkeypatch.setenv(zygote.ZYGOTE, use)
    for name in ("ctypes", "gc", "json", "os", "random", "signal", "struct"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)"
        )
    monkeypatch.chdir(tmp_path)
    with collect(1) as collector:
        assert collector.next().numel() == 16
    assert not (tmp_path / "ran").exists()


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
    monkeypatch.setattr(local_processes, "_REAP_TIMEOUT_S", REAP_S)
    exits = Exits()
    processes = LocalProcesses(exits)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = TrainerAddress("127.0.0.1", silent.getsockname()[1], "")
        for worker_id in range(4):
            processes.spawn(WorkerBoot(worker_id, 0, trainer), {})
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
