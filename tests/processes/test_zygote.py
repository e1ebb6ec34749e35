"""Workers are forked from a process that has imported what they need."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.marked import Marked
from helpers.waiting import eventually

import distcollect as dc
from distcollect.launch import zygote

WAIT_S = 60


class Reporting(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that tells what kind of process it is stepped in."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def process(self) -> dict[str, Any]:
        """Facts about this process."""
        guard = Path(f"/proc/{os.getppid()}/stat").read_text()
        links = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # of the folder itself, which is closed by now
                links.append(str(fd.readlink()))
        return {
            "pid": os.getpid(),
            "started_by": int(guard.rpartition(")")[2].split()[1]),
            "group": os.getpgid(0),
            "folder": str(Path.cwd()),
            "variable": os.environ.get("OF_THE_TRAINER"),
            "path": list(sys.path),
            "cores": os.sched_getaffinity(0),
            "torch_threads": torch.get_num_threads(),
            "authkey": bytes(multiprocessing.current_process().authkey),
            "collects_garbage": gc.isenabled(),
            "start_method": multiprocessing.get_start_method(allow_none=True),
            "has_torchrl": "torchrl.envs" in sys.modules,
            "random": (random.random(), float(np.random.random()), float(torch.rand(()))),  # noqa: NPY002
            "memfds": sum("memfd:" in link for link in links),
            "sockets": sum(link.startswith("socket:") for link in links),
        }


def collect(num_workers: int = 2, **options: Any) -> dc.MultiSyncDataCollector:
    return dc.MultiSyncDataCollector(
        [Reporting] * num_workers, None, frames_per_batch=16 * num_workers, **options
    )


def processes(collector: dc.MultiSyncDataCollector) -> list[dict[str, Any]]:
    return [facts for [facts] in collector.call("process").values()]


def test_a_forked_worker_is_like_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The zygote may be older than all of this."""
    zygote.close()
    monkeypatch.setattr(sys, "path", [tmp_path / "which Python ignores", *sys.path])
    zygote.warm_up()
    monkeypatch.setenv("OF_THE_TRAINER", "when the collector was made")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with collect() as collector:
        collector.next()
        forked, parent = processes(collector), zygote.pid()
    monkeypatch.setenv(zygote.ZYGOTE, "off")
    with collect() as collector:
        collector.next()
        alone = processes(collector)
    assert {facts["started_by"] for facts in forked} == {parent}
    assert {facts["started_by"] for facts in alone} == {os.getpid()}
    for facts in (*forked, *alone):
        assert facts["group"] == facts["pid"]
        assert facts["folder"] == str(tmp_path)
        assert facts["variable"] == "when the collector was made"
        assert facts["authkey"] == bytes(multiprocessing.current_process().authkey)
        assert facts["collects_garbage"]
        # Without the temporary folder that torch 2.8 adds in each process.
        folder = Path(tempfile.gettempdir())
        facts["path"] = [each for each in facts["path"] if Path(each).parent != folder]
    for key in ("path", "cores", "start_method", "torch_threads", "memfds", "sockets"):
        assert [facts[key] for facts in forked] == [facts[key] for facts in alone], key
    for first, second in zip(forked[0]["random"], forked[1]["random"], strict=True):
        assert first != second


def test_a_replacement_is_forked_too() -> None:
    with collect() as collector:
        collector.next()
        first = processes(collector)
        os.kill(first[1]["pid"], signal.SIGKILL)
        eventually(
            lambda: len(collector.call("process")) == 2 and processes(collector)[1] != first[1],
            WAIT_S,
        )
        assert processes(collector)[1]["started_by"] == zygote.pid()


def test_a_killed_zygote_costs_its_workers_and_no_frame(marked: Marked) -> None:
    with collect() as collector:
        collector.next()
        first = zygote.pid()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        eventually(lambda: zygote.pid() not in {None, first}, WAIT_S)
        for _ in range(3):
            assert collector.next().numel() == 32
        assert {facts["started_by"] for facts in processes(collector)} == {zygote.pid()}
    assert marked.gone(), marked.left()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's
def test_torchrl_is_imported_once_if_the_trainer_has_it() -> None:
    pytest.importorskip("torchrl.envs")
    zygote.close()
    with collect() as collector:
        collector.next()
        for facts in processes(collector):
            assert facts["started_by"] == zygote.pid()
            assert facts["has_torchrl"]
            # As in a process of its own, though importing TorchRL sets it.
            assert facts["start_method"] is None


@pytest.mark.parametrize(("use", "is_kept"), [("keep", True), ("collector", False)])
def test_it_waits_for_the_next_collector_or_ends(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, use: str, is_kept: bool
) -> None:
    monkeypatch.setenv(zygote.ZYGOTE, use)
    with collect(1) as collector:
        with collect(1):
            pid = zygote.pid()
        # While a collector is open, it stays.
        assert zygote.pid() == pid
        assert processes(collector)[0]["started_by"] == pid
    assert (zygote.pid() == pid) == is_kept
    assert marked.gone(WAIT_S), marked.left()


def test_an_unknown_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(zygote.ZYGOTE, "never")
    with pytest.raises(dc.ArgumentError, match=r"DISTCOLLECT_ZYGOTE='never'.*keep, collector, off"):
        collect(1)


def test_whatever_keeps_it_from_starting_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: int) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr(zygote, "_start", start)
    monkeypatch.setattr(zygote, "_START_TIMEOUT_S", 1.0)
    with pytest.raises(TypeError, match="no such thing"):
        zygote.Zygote()


STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
# As torch is after what was imported has loaded the driver of a GPU.
USES_CUDA = """
import torch
torch.backends.cuda.is_built = torch.cuda._is_in_bad_fork = lambda: True
"""


@pytest.mark.parametrize(
    ("imported", "why"),
    [(STARTS_A_THREAD, "has started 1 thread(s)"), (USES_CUDA, "has used CUDA")],
)
def test_what_uses_threads_or_cuda_at_import_is_not_forked_from(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    imported: str,
    why: str,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(imported)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with collect(1) as collector:
        collector.next()
        assert processes(collector)[0]["started_by"] == os.getpid()
    assert why in caplog.text
    zygote.close()


def test_variables_that_libraries_read_when_loaded_get_another_zygote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collect(1) as collector:
        collector.next()
        first = zygote.pid()
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with collect(1) as other:
            [facts] = processes(other)
        collector.next()
    assert facts["started_by"] != first
    assert facts["torch_threads"] == 2


def test_a_forked_child_of_the_trainer_leaves_its_zygote_alone() -> None:
    with collect(1) as collector:
        collector.next()
        pid = zygote.pid()
        child = os.fork()
        if child == 0:
            sys.exit = os._exit  # type: ignore[assignment] # not pytest's own end
            zygote.close()
            os._exit(0 if zygote.pid() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        collector.next()
        assert zygote.pid() == pid


def test_it_ends_with_a_killed_trainer_though_it_still_imports(marked: Marked) -> None:
    code = (
        "from distcollect.launch import zygote; zygote.warm_up(); print(zygote.pid(), flush=True)"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        int(trainer.stdout.readline())
        trainer.kill()
    assert marked.gone(), marked.left()
