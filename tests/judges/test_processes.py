"""Judges the processes that a run starts, under conditions that launchers and users set.

The expectations are those of the pages Failures, Launching and Security.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.judge_launches import Condition, Ended

TERM, USR1, USR2, HUP, CHLD = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGCHLD,
)
slow = pytest.mark.slow

COLLECTED = {
    "frames": 8,
    "replaced": [True, True],
    "the other one stayed": True,
    "all accounted for": True,
}
# What a module of this name in the working folder does when it is imported.
POISON = "import os\nopen(os.environ['JUDGE_MARKER'], 'a').write(__name__ + '\\n')\n"
POISONED = ("json", "ctypes", "random", "gc", "typing", "pickle", "numpy", "signal", "distcollect")
# As on Pythons that were built for an old libc.
WITHOUT = """
import os, signal
for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal")):
    if hasattr(module, name):
        delattr(module, name)
"""
# As in a sandbox whose kernel refuses them.
REFUSED = """
import errno, os

def refuse(*_):
    raise OSError(errno.ENOSYS, "refused")

os.memfd_create = os.pidfd_open = refuse
"""


def check_collects(ended: Ended) -> None:
    assert ended.code == 0, ended.output
    assert ended.seen["collect"] == COLLECTED
    assert ended.left == []


def with_site(folder: Path, code: str) -> dict[str, str]:
    """Variables that have every Python run this code when it starts."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(code)
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param((TERM, USR1, USR2, HUP, CHLD), id="all"),
        *(pytest.param((number,), id=number.name, marks=slow) for number in (TERM, HUP, CHLD)),
    ],
)
def test_signals_that_are_ignored(ignored: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    check_collects(Condition(ignored=ignored).run(tmp_path, "collect"))


@pytest.mark.parametrize(
    "ignored", [(), pytest.param((TERM, USR1, USR2, HUP, CHLD), id="all", marks=slow)]
)
def test_torchrun_with_signals_that_are_ignored(
    ignored: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    ended = Condition(ignored=ignored, options=torchrun).run(tmp_path, "launched")
    assert ended.code == 0, ended.output
    assert ended.seen["launched"] == COLLECTED
    assert ended.left == []


@pytest.mark.parametrize(
    "zygote", [pytest.param("keep", id="forked"), pytest.param("off", id="alone", marks=slow)]
)
def test_signals_to_all_descendants(zygote: str, tmp_path: Path) -> None:
    """The trainer decides what follows: a run goes on after all but SIGTERM."""
    ended = Condition(env={"DISTCOLLECT_ZYGOTE": zygote}).run(tmp_path, "signals", "terminate")
    assert ended.code == 0, ended.output
    after_others, after_term = ended.seen["signals"], ended.seen["terminate"]
    assert after_others == {
        "workers": [0, 1],
        "same": True,
        "lost": {},
        "replaced alone": True,
    }
    # Each worker has finished its rollout, and has left in order.
    assert after_term["ended"]
    assert "worker_lost" not in after_term["lost"], after_term
    assert ended.left == []


def test_sigterm_to_the_trainer_and_all_descendants(tmp_path: Path) -> None:
    ended = Condition().run(tmp_path, "terminate_all")
    assert ended.code == 75, ended.output
    assert ended.seen["terminate_all"] == {"code": 75, "saved": True}
    assert ended.left == []


@pytest.mark.parametrize(
    "zygote", [pytest.param("keep", id="forked"), pytest.param("off", id="alone", marks=slow)]
)
def test_modules_in_the_working_folder(zygote: str, tmp_path: Path) -> None:
    """They are not those that Python's own modules and this package mean."""
    folder, marker = tmp_path / "poisoned", tmp_path / "marker"
    folder.mkdir()
    for name in POISONED:
        (folder / f"{name}.py").write_text(POISON)
    env = {"JUDGE_MARKER": str(marker), "DISTCOLLECT_ZYGOTE": zygote}
    ended = Condition(folder=folder, env=env).run(tmp_path, "collect")
    assert not marker.exists(), marker.read_text()
    check_collects(ended)


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param((0, 1, 2), id="all"),
        *(pytest.param((fd,), id=f"{fd}", marks=slow) for fd in (0, 1, 2)),
        pytest.param((1, 2), id="1 and 2", marks=slow),
    ],
)
def test_closed_descriptors(closed: tuple[int, ...], tmp_path: Path) -> None:
    check_collects(Condition(closed=closed).run(tmp_path, "collect"))


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ([], "auto"),
        # All of torch is compiled once more for it.
        pytest.param(["-OO"], None, marks=slow),
        pytest.param(["-I"], None, marks=slow),
        pytest.param(["-I", "-B", "-X", "dev"], "2,1", marks=slow),
        *(pytest.param([], value, marks=slow) for value in ("0", "-1", "2.0", "", "9" * 30)),
    ],
)
def test_options_of_python_and_numbers_of_threads(
    options: list[str], threads: str | None, tmp_path: Path
) -> None:
    env = {} if threads is None else {"OMP_NUM_THREADS": threads}
    check_collects(Condition(options=options, env=env).run(tmp_path, "collect"))


@pytest.mark.parametrize("code", [WITHOUT, REFUSED], ids=["unknown", "refused"])
def test_a_python_without_new_calls_of_the_kernel(code: str, tmp_path: Path) -> None:
    env = with_site(tmp_path, code)
    check_collects(Condition(env=env).run(tmp_path, "collect"))


def test_shutdown_of_stuck_processes_does_not_wait_for_one_after_the_other(tmp_path: Path) -> None:
    ended = Condition().run(tmp_path, "stuck")
    assert ended.code == 0, ended.output
    took = ended.seen["stuck"]
    assert took["4"] < took["1"] + 8, took
    assert ended.left == []


def test_a_port_scanner_at_a_workers_port(tmp_path: Path) -> None:
    """The worker is replaced, and the log says why."""
    ended = Condition().run(tmp_path, "scanned")
    assert ended.code == 0, ended.output
    seen = ended.seen["scanned"]
    assert (seen["workers"], seen["after"]) == ([0, 1], [0, 1])
    assert "port scanner" in seen["named"]
    assert ended.left == []


@slow
def test_a_port_scanner_at_the_trainers_ports(tmp_path: Path) -> None:
    """As Security says, that ends the process; then nothing of the run is left."""
    ended = Condition().run(tmp_path, "touched")
    assert ended.code in (-signal.SIGABRT, -signal.SIGSEGV), ended.output
    assert ended.left == []
