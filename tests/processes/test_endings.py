"""However a program ends, nothing of it is left after 10 s."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from helpers.descendants import processes, with_variable
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.programs import run_python

SCRIPT = SCRIPTS / "end_in_some_way.py"
END_S = 30
slow = pytest.mark.slow
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ONE_WORKER = [*TORCHRUN, "--nproc-per-node=2"]


class Program:
    """The script, in a process group of its own."""

    def __init__(self, marked: Marked, launcher: list[str], *args: str) -> None:
        self._marked = marked
        self.process = subprocess.Popen(
            [*launcher, str(SCRIPT), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
        )
        assert self.process.stdout is not None
        self._stdout = self.process.stdout
        self.output: list[str] = []

    def await_line(self, wanted: str) -> None:
        """Read its output up to this line; pytest's timeout is the deadline."""
        for line in self._stdout:
            self.output.append(line.strip())
            if line.strip() == wanted:
                self._marked.note()
                return
        raise AssertionError("\n".join(["the program ended early:", *self.output]))

    def rank0(self) -> int:
        """The process that runs main()."""
        if "torch.distributed.run" not in self.process.args:
            return self.process.pid
        known = processes()
        ranks = with_variable("RANK", "0")
        return next(pid for pid in ranks if known.get(pid, ("", 0))[1] == self.process.pid)

    def end(self) -> int:
        """Wait until nothing is left; return the exit code."""
        began = time.monotonic()
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {END_S} s: {self._marked.left()}\n{self.output}")
        remaining = END_S - (time.monotonic() - began)
        assert self._marked.gone(remaining), f"left: {self._marked.left()}\n{self.output}"
        with self._stdout:
            self.output += self._stdout.read().splitlines()
        return code


@pytest.fixture
def run(marked: Marked) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def run(launcher: list[str], *args: str) -> Program:
        programs.append(Program(marked, launcher, *args))
        return programs[-1]

    yield run
    for program in programs:
        program.process.kill()
        program.process.wait()
        program.process.stdout.close()


Run = Callable[..., Program]


@pytest.mark.parametrize(
    ("launcher", "kind", "end"),
    [
        pytest.param(PYTHON, "fine", "normal", id="python-normal", marks=slow),
        pytest.param(PYTHON, "fine", "break", id="python-break"),
        pytest.param(PYTHON, "fine", "raise", id="python-raise", marks=slow),
        pytest.param(PYTHON, "vector", "normal", id="python-vector-normal", marks=slow),
        pytest.param(PYTHON, "vector", "break", id="python-vector-break", marks=slow),
        pytest.param(PYTHON, "vector", "raise", id="python-vector-raise"),
        pytest.param(ONE_WORKER, "fine", "normal", id="torchrun-normal", marks=slow),
        pytest.param(ONE_WORKER, "fine", "break", id="torchrun-break", marks=slow),
        pytest.param(ONE_WORKER, "fine", "raise", id="torchrun-raise", marks=slow),
    ],
)
def test_ends_by_itself(run: Run, launcher: list[str], kind: str, end: str) -> None:
    program = run(launcher, kind, end)
    program.await_line("batch")
    if end != "raise":
        program.await_line("left the loop")
    code = program.end()
    output = "\n".join(program.output)
    if end == "raise":
        assert code == 1
        assert "the user's loop is broken" in output
        assert "left the loop" not in output
    else:
        assert code == 0, output
        assert "Error" not in output
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("kind", "number", "group"),
    [
        ("fine", "SIGINT", True),
        pytest.param("fine", "SIGTERM", False, marks=slow),
        pytest.param("fine", "SIGKILL", False, marks=slow),
        pytest.param("hang", "SIGINT", False, marks=slow),
        pytest.param("hang", "SIGKILL", False, marks=slow),
        pytest.param("gil", "SIGINT", True, marks=slow),
        ("gil", "SIGTERM", False),
        ("gil", "SIGKILL", False),
        pytest.param("vector", "SIGINT", True, marks=slow),
        ("vector", "SIGKILL", False),
    ],
)
def test_python_is_ended(run: Run, kind: str, number: str, group: bool) -> None:
    program = run(PYTHON, kind, "forever")
    program.await_line("stuck" if kind in {"hang", "gil"} else "batch")
    (os.killpg if group else os.kill)(program.process.pid, signal.Signals[number])
    assert program.end() == -signal.Signals[number]


def test_ctrl_c_while_weights_go_to_a_worker_that_is_stuck(run: Run) -> None:
    """The exit must not wait for a push that can't succeed."""
    program = run(PYTHON, "gil", "push")
    program.await_line("stuck")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == -signal.SIGINT


@pytest.mark.parametrize(
    ("kind", "number", "whom"),
    [
        # Over TCP test_without_rpc.py runs it each time.
        pytest.param("fine", "SIGINT", "group", marks=slow),
        pytest.param("fine", "SIGTERM", "torchrun", marks=slow),
        ("hang", "SIGTERM", "torchrun"),
        ("gil", "SIGKILL", "trainer"),
    ],
)
def test_torchrun_is_ended(run: Run, kind: str, number: str, whom: str) -> None:
    program = run(ONE_WORKER, kind, "forever")
    program.await_line("stuck" if kind in {"hang", "gil"} else "batch")
    if whom == "group":
        # A terminal's Ctrl-C reaches the ranks too, which torchrun puts into its own group.
        os.killpg(program.process.pid, signal.Signals[number])
    else:
        pid = program.process.pid if whom == "torchrun" else program.rank0()
        os.kill(pid, signal.Signals[number])
    assert program.end() != 0


def test_no_interrupt_is_lost_and_none_leaves_a_lock_behind() -> None:
    """Wherever in next() the interrupt comes; and the workers still end."""
    done = run_python(SCRIPTS / "interrupt_often.py", timeout_s=100)
    assert done.returncode == 0, done.stderr
    sent, seen = map(int, done.stdout.split())
    assert sent == seen > 20, done.stderr


def test_what_is_open_is_closed_before_what_was_imported_later_ends() -> None:
    """As Ray, which would end the workers' actors before their collector is closed."""
    code = """
import atexit
from distcollect.collectors import finalizer as closing
owner = {1}
kept = closing.Finalizer(owner, lambda: print("closed", flush=True), 60.0)
atexit.register(lambda: print("Ray ends", flush=True))
closing.close_first_at_exit()
"""
    assert run_python("-c", code, timeout_s=60).stdout.split("\n")[:2] == ["closed", "Ray ends"]
