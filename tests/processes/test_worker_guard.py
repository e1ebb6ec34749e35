"""The process between a trainer and its worker, by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.descendants import descendants

from distcollect.common import worker_guard

END_S = 60

# The kernel closes what a worker holds before it tells the guard of the end. Much memory on both
# sides of the connection makes that last until the trainer has seen it closed and sends a kill.
CRASH = """
import os, resource, signal, sys
connection = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def hold():
    fd = os.memfd_create("much")
    for _ in range(256):
        os.write(fd, bytes(1 << 20))
hold()
os.dup(connection)
os.close(connection)
hold()
os.kill(os.getpid(), signal.SIGSEGV)
"""

GUARDED = f"""
import os, sys
from distcollect.common import worker_guard
worker_guard.guard(os.getppid())
{CRASH}
"""

# The worker goes on only when its guard is gone.
KILLED_AT_ONCE = """
import os, signal, time
from distcollect.common import worker_guard
guard, setsid = os.getpid(), os.setsid
def outlive_the_guard():
    os.kill(guard, signal.SIGKILL)
    while os.getppid() == guard:
        time.sleep(0.001)
    setsid()
os.setsid = outlive_the_guard
worker_guard.guard(os.getppid())
print("the worker runs")
"""

# As an env with processes of its own does, which are started and not forked.
HOLDS_A_SEMAPHORE = """
import multiprocessing, os, signal, subprocess, sys
from distcollect.common import worker_guard
worker_guard.guard(os.getppid())
held = multiprocessing.get_context("spawn").Semaphore()
tracker = multiprocessing.resource_tracker._resource_tracker._fd
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[tracker])
print(held._semlock.name, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("whom", ["worker", "guard"])
def test_nothing_of_a_killed_worker_stays_in_shared_memory(whom: str) -> None:
    """Python's resource tracker, which frees it, is not killed with the other processes."""
    command = [sys.executable, "-c", HOLDS_A_SEMAPHORE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout is not None
        name = guard.stdout.readline().strip().removeprefix("/")
        file = Path("/dev/shm") / f"sem.{name}"
        assert file.exists()
        processes = descendants(guard.pid)
        assert len(processes) == 1 + 2  # the tracker and the one that pauses
        if whom == "worker":
            os.kill(worker_guard.children_of(guard.pid)[0], signal.SIGKILL)
        else:
            guard.send_signal(worker_guard.KILL)
        assert guard.wait(END_S) == -signal.SIGKILL
    assert not file.exists()
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_a_kill_does_not_hide_how_a_worker_ended() -> None:
    seen, connection = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(connection)],
        pass_fds=[connection],
        start_new_session=True,
    )
    os.close(connection)
    with process, os.fdopen(seen, "rb") as reader:
        reader.read()  # until it is closed
        process.send_signal(worker_guard.KILL)
        assert process.wait(END_S) == -signal.SIGSEGV


def test_a_worker_whose_guard_is_killed_at_once_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED_AT_ONCE], stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        assert guard.stdout.read() == b""  # until the worker, too, has closed it
    assert guard.returncode == -signal.SIGKILL
