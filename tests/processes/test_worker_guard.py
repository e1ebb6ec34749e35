"""The process between a trainer and its worker, by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
