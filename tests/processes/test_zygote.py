"""Workers are forked from a process that has imported what they need."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.descendants import links_of
from helpers.descendants import processes as processes_by_id
from helpers.marked import Marked
from helpers.waiting import eventually

import distcollect as dc
from distcollect.common import memory_segment
from distcollect.launch import zygote
from distcollect.launch.zygote import Inheritance

WAIT_S = 60
_PR_SET_NO_NEW_PRIVS = 38


class Reporting(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that tells what kind of process it is stepped in."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def process(self) -> dict[str, Any]:
        """Facts about this process."""
        links = links_of("self")
        return {
            "pid": os.getpid(),
            "started_by": processes_by_id()[os.getppid()][1],
            "command": Path("/proc/self/cmdline").read_bytes(),
            "folder": str(Path.cwd()),
            "path": list(sys.path),
            "torch_threads": torch.get_num_threads(),
            "authkey": bytes(multiprocessing.current_process().authkey),
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


def are_forked(collector: dc.MultiSyncDataCollector) -> bool:
    """True if workers are forks, False if they are each a new Python; the zygote starts both."""
    workers = processes(collector)
    assert {facts["started_by"] for facts in workers} == {zygote.pid()}
    command = Path(f"/proc/{zygote.pid()}/cmdline").read_bytes()
    [are_forks] = {facts["command"] == command for facts in workers}
    return are_forks


def test_forked_workers_share_what_they_should_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In all else they are as processes of their own, which tests/judges show."""
    with collect() as collector:
        collector.next()
        forked, are_forks = processes(collector), are_forked(collector)
    monkeypatch.setenv(zygote.ZYGOTE, "off")
    with collect() as collector:
        collector.next()
        alone = processes(collector)
        assert are_forks
        assert not are_forked(collector)
    for key in ("authkey", "memfds", "sockets"):
        assert [facts[key] for facts in forked] == [facts[key] for facts in alone], key
    assert forked[0]["authkey"] == bytes(multiprocessing.current_process().authkey)
    for first, second in zip(forked[0]["random"], forked[1]["random"], strict=True):
        assert first != second


@pytest.mark.parametrize("use", ["keep", pytest.param("off", marks=pytest.mark.slow)])
def test_a_replacement_has_the_folder_and_path_of_the_time_when_its_collector_was_made(
    use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(zygote.ZYGOTE, use)
    with collect() as collector:
        collector.next()
        before = processes(collector)[1]
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        os.kill(before["pid"], signal.SIGKILL)
        eventually(
            lambda: (
                len(collector.call("process")) == 2
                and processes(collector)[1]["pid"] != before["pid"]
            ),
            WAIT_S,
        )
        after = processes(collector)[1]
        assert are_forked(collector) == (use == "keep")
    assert after["folder"] == before["folder"] != str(tmp_path)
    assert str(tmp_path) not in after["path"]


def test_a_script_whose_working_folder_was_removed_has_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in no other test: the zygote is a new one
    with dc.MultiSyncDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1) as collector:
        assert collector.next().numel() == 8


def test_a_killed_zygote_costs_its_workers_and_no_frame(marked: Marked) -> None:
    with collect() as collector:
        collector.next()
        first = zygote.pid()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        eventually(lambda: zygote.pid() not in {None, first}, WAIT_S)
        for _ in range(3):
            assert collector.next().numel() == 32
        assert are_forked(collector)
    assert marked.gone(), marked.left()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's
def test_torchrl_is_imported_once_if_the_trainer_has_it() -> None:
    pytest.importorskip("torchrl.envs")
    zygote.close()
    with collect() as collector:
        collector.next()
        assert are_forked(collector)
        for facts in processes(collector):
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
        assert not are_forked(collector)
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


def test_a_zygote_that_is_asked_for_a_worker_is_not_ended_for_another_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose variables are others, and which is made at the same moment, on another thread."""
    zygote.close()
    small_file = memory_segment.small_file

    def meanwhile() -> Any:
        other = replace(Inheritance.now(), environ={**os.environ, "OMP_NUM_THREADS": "2"})
        making = threading.Thread(target=zygote.warm_up, args=(other,))
        making.start()
        making.join(2)
        return small_file()

    monkeypatch.setattr(memory_segment, "small_file", meanwhile)
    with collect(1) as collector:
        assert collector.next().numel() == 16
    zygote.close()


def test_workers_start_though_the_zygote_lacks_a_module_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zygote.close()
    monkeypatch.setattr(zygote, "_PRELOADED_IF_USED", ("made_by_a_script",))
    monkeypatch.setitem(sys.modules, "made_by_a_script", sys)
    with collect(1) as collector:
        assert collector.next().numel() == 16
    zygote.close()


@pytest.mark.skipif(
    "NoNewPrivs:\t0" not in Path("/proc/self/status").read_text(), reason="it may do no less"
)
def test_a_trainer_that_gives_up_privileges_gets_another_zygote() -> None:
    child = os.fork()  # it can't be undone
    if child == 0:
        with contextlib.suppress(BaseException):
            inheritance = Inheritance.now()
            before = inheritance.origin()
            assert ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            os._exit(0 if inheritance.origin() != before else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_it_ends_with_a_killed_trainer_though_it_still_imports(marked: Marked) -> None:
    code = (
        "from distcollect.launch import zygote; zygote.warm_up(zygote.Inheritance.now()); "
        "print(zygote.pid(), flush=True); input()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        int(trainer.stdout.readline())
        trainer.kill()
    assert marked.gone(), marked.left()
