"""Worker processes on this host."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.descendants import descendants
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.waiting import eventually

from distcollect.launch import zygote
from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.local_processes import LocalProcesses, ProcessReport
from distcollect.net.messages import Exited, Spawn, TrainerAddress, WorkerSettings

SOON_S = 60
HANG = "import time; time.sleep(1000)"
GRANDCHILD = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
SpawnCode = Callable[[int, str], None]


def start(processes: LocalProcesses, worker_id: int, port: int = 0, **env: str) -> None:
    wanted = Spawn(worker_id, 0, WorkerSettings(), env)
    processes.spawn(wanted, TrainerAddress("127.0.0.1", port, ""), CpuPlacement(None, 1))


class Exits:
    """Records the exits that are reported."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, int]] = queue.Queue()

    def __call__(self, report: ProcessReport) -> None:
        assert isinstance(report, Exited)
        self._queue.put((report.worker_id, report.exit.code))

    def next(self, timeout_s: float = SOON_S) -> tuple[int, int]:
        return self._queue.get(timeout=timeout_s)


@pytest.fixture
def exits() -> Exits:
    return Exits()


@pytest.fixture(scope="module")
def _no_older_zygote() -> None:
    """Guards are forked from it: that of another module may lack the mark."""
    zygote.close()


@pytest.fixture
def processes(_no_older_zygote: None, marked: Marked, exits: Exits) -> Iterator[LocalProcesses]:
    processes = LocalProcesses(exits)
    yield processes
    processes.close(0)
    assert marked.gone(SOON_S), marked.left()


@pytest.fixture
def spawn(processes: LocalProcesses, tmp_path: Path) -> SpawnCode:
    def spawn(worker_id: int, code: str) -> None:
        folder = tmp_path / str(worker_id)
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(code)
        # Code of the same size written in the same second would be loaded from the old .pyc file.
        start(processes, worker_id, PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1")

    return spawn


def await_count(marked: Marked, count: int, timeout_s: float = SOON_S) -> None:
    eventually(lambda: len(marked.pids()) == count, timeout_s, marked.left)


def test_a_real_worker_that_finds_no_trainer_says_so(
    processes: LocalProcesses, exits: Exits, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]
        start(processes, 3, port)
        assert exits.next(60) == (3, 1)
    assert "ConnectionRefusedError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "reported"), [("_exit(0)", 0), ("_exit(7)", 7), ("kill(os.getpid(), 11)", -11)]
)
def test_ends_are_reported(spawn: SpawnCode, exits: Exits, code: str, reported: int) -> None:
    spawn(2, f"import os; os.{code}")
    assert exits.next() == (2, reported)


def test_kill_ends_a_worker_and_what_it_started_and_no_other(
    processes: LocalProcesses, spawn: SpawnCode, exits: Exits, marked: Marked
) -> None:
    for worker_id in (0, 1):
        spawn(worker_id, f"{GRANDCHILD}; {HANG}")
    await_count(marked, 6)  # with their guards
    processes.kill(1, 0)
    assert exits.next() == (1, -signal.SIGKILL)
    await_count(marked, 3)
    processes.kill(1, 0)  # it has ended already: no error
    processes.kill(99, 0)


def test_what_a_worker_leaves_behind_is_ended(
    spawn: SpawnCode, exits: Exits, marked: Marked
) -> None:
    spawn(0, f"{GRANDCHILD}; import os; os._exit(0)")
    assert exits.next() == (0, 0)
    await_count(marked, 0)


def test_a_worker_ends_with_its_guard(spawn: SpawnCode, exits: Exits, marked: Marked) -> None:
    spawn(0, HANG)
    await_count(marked, 2)
    [guard] = [pid for pid in marked.pids() if descendants(pid)]
    os.kill(guard, signal.SIGKILL)
    assert exits.next() == (0, -signal.SIGKILL)
    await_count(marked, 0)


def test_close_waits_then_kills_and_reaps(
    processes: LocalProcesses, spawn: SpawnCode, exits: Exits, marked: Marked
) -> None:
    spawn(0, "import time, os; time.sleep(0.5); os._exit(0)")
    spawn(1, f"{GRANDCHILD}; {HANG}")
    await_count(marked, 5)
    processes.close(2)
    assert {exits.next(0), exits.next(0)} == {(0, 0), (1, -signal.SIGKILL)}
    assert not marked.left()
    processes.close(0)  # closing twice is no error


SCRIPT = SCRIPTS / "start_workers.py"


def run_starter(tmp_path: Path, *todo: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process with two hanging workers that have a child each; return its fork's pid."""
    (tmp_path / "sitecustomize.py").write_text(f"{GRANDCHILD}; {HANG}")
    starter = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path), *todo], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    return starter, int(starter.stdout.readline())


def test_kill_9_of_the_starter_ends_all_workers(marked: Marked, tmp_path: Path) -> None:
    """Also if a forked child holds the connection to the zygote open."""
    starter, forked = run_starter(tmp_path)
    await_count(marked, 1 + 1 + 1 + 2 * 3)  # with the zygote, and their guards
    starter.kill()
    starter.communicate()
    assert marked.gone(SOON_S, but={forked}), marked.left()
    assert marked.pids() == [forked]


def test_close_is_quick_though_a_forked_child_holds_the_connection(
    marked: Marked, tmp_path: Path
) -> None:
    starter, forked = run_starter(tmp_path, "close")
    began = time.monotonic()
    assert starter.wait(30) == 0
    took = time.monotonic() - began
    assert marked.gone(SOON_S, but={forked}), marked.left()
    starter.communicate()
    assert took < 4
