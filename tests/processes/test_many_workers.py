"""Many workers at once, and many one after the other."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.descendants import links_of
from helpers.envs import ProcessIdEnv
from helpers.marked import Marked
from helpers.policies import ConstantPolicy
from helpers.waiting import eventually
from torch import nn

import distcollect as dc
from distcollect.common import open_files
from distcollect.launch import zygote

T = 16
START_S = 600
WAIT_S = 120
NUM_TOGETHER = 4
LARGE = 4 << 20

pytestmark = pytest.mark.timeout(1800)


def smaps(pid: int | str, name: str) -> int:
    """A size of a process's memory in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


@pytest.mark.parametrize(
    "num_workers",
    [8, pytest.param(64, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)],
)
def test_many_at_once(marked: Marked, num_workers: int) -> None:
    """They join, get weights, deliver, and some of them leave; each has its own connections."""
    begin, files_before = time.monotonic(), len(links_of("self"))
    with dc.MultiSyncDataCollector(
        [ProcessIdEnv] * num_workers,
        ConstantPolicy(),
        frames_per_batch=T * num_workers,
        faults=dc.Faults(start_timeout_s=START_S, batch_timeout_s=START_S),
    ) as collector:
        for version in range(1, 4):
            handle = collector.update_policy_weights_()
            assert handle is not None
            assert sorted(handle.acknowledged) == list(range(num_workers))
            batch = collector.next()
            assert (batch["collector", "policy_version"] == version).all()
            assert batch.numel() == T * num_workers
            workers = batch["collector", "worker_id"].flatten().unique()
            assert workers.tolist() == list(range(num_workers))
            assert len(batch["observation"].unique()) == num_workers  # of processes
        started_s = time.monotonic() - begin
        marked.note()
        proportional = sum(smaps(pid, "Pss") for pid in marked.pids())
        num_files = len(links_of("self")) - files_before
        print(
            f"{num_workers} workers: {started_s:.1f} s, {proportional / 2**20:.0f} MiB (PSS), "
            f"{num_files} open files of the trainer"
        )
        assert num_files <= 200 + 8 * num_workers
        leavers = list(range(num_workers // 2))
        collector.release(leavers)
        batch = collector.next()
        workers = batch["collector", "worker_id"].flatten().unique()
        assert workers.tolist() == list(range(num_workers // 2, num_workers))
    assert collector.ledger.total.lost == {}
    assert marked.gone(WAIT_S), marked.left()


class LargePolicy(ConstantPolicy):
    """Has 4 MB more, so that its plan is large."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Buffer(torch.zeros(LARGE, dtype=torch.uint8))


def test_workers_of_a_host_share_a_large_plan(marked: Marked) -> None:
    """One of them has it in memory; when that one is killed, its replacement gets a plan too."""

    def workers() -> dict[int, int]:
        """The process of each worker that delivers."""
        batch = collector.next()
        ids, pids = batch["collector", "worker_id"], batch["observation"]
        return dict(zip(ids.flatten().tolist(), pids.int().flatten().tolist(), strict=True))

    with dc.MultiSyncDataCollector(
        [ProcessIdEnv] * 3, LargePolicy(), frames_per_batch=3 * T
    ) as collector:
        first = workers()
        [sharer] = [w for w, pid in first.items() if max(shared_sizes(pid)) > LARGE]
        os.kill(first[sharer], signal.SIGKILL)
        eventually(lambda: {**first, **workers()}[sharer] != first[sharer])
    assert marked.gone(WAIT_S), marked.left()


@dataclass(frozen=True)
class Holdings:
    """What this process and its zygote hold, as numbers; the files of this one without memory."""

    threads: int
    files: int
    files_of_zygote: int
    processes: int

    @classmethod
    def now(cls, marked: Marked) -> Holdings:
        return cls(
            threading.active_count(),
            sum(not link.startswith("/memfd:") for link in links_of("self")),
            len(links_of(zygote.pid())),
            len(marked.pids()),
        )


def shared_sizes(pid: int) -> list[int]:
    """Bytes of each memory that a process shares with others."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return [fd.stat().st_size for fd in files if str(fd.readlink()).startswith("/memfd:")]


def num_shared() -> int:
    """How much memory this process shares with others, as a number of files."""
    return sum(link.startswith("/memfd:") for link in links_of("self"))


def test_a_local_worker_takes_as_many_files_as_are_counted_for_it() -> None:
    def num_files(num_workers: int) -> int:
        with dc.MultiSyncDataCollector(
            "CartPole-v1", frames_per_batch=4 * num_workers, num_workers=num_workers
        ) as collector:
            for _ in range(3):  # a worker has memory for two rollouts
                collector.next()
            return len(list(Path("/proc/self/fd").iterdir()))

    assert num_files(3) - num_files(1) <= 2 * open_files.FILES_PER_LOCAL_WORKER


# A kill may leave a few bytes; memory that is allocated once counts too.
@pytest.mark.parametrize(
    ("num_kills", "most_mib"),
    [(8, 32), pytest.param(200, 64, marks=pytest.mark.slow)],
)
def test_many_replacements_leave_nothing(marked: Marked, num_kills: int, most_mib: int) -> None:
    faults = dc.Faults(max_restarts=num_kills, restart_pause_s=0.05)
    pids: dict[int, int] = {}
    gc.collect()
    shared_before = num_shared()

    with dc.RPCDataCollector(
        ProcessIdEnv, frames_per_batch=T, num_workers=NUM_TOGETHER, faults=faults
    ) as collector:

        def until_replaced(killed: set[int]) -> None:
            deadline = time.monotonic() + WAIT_S
            while len(pids) < NUM_TOGETHER or killed & {*pids.values()}:
                assert time.monotonic() < deadline, (collector.worker_states, killed, pids)
                batch = collector.next()
                worker_id = int(batch["collector", "worker_id"][0, 0])
                pids[worker_id] = int(batch["observation"][0, -1, 0])

        def replace_all() -> None:
            killed = {*pids.values()}
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            until_replaced(killed)

        until_replaced(set())
        replace_all()  # makes what is made once and used again
        marked.note()
        before, used = Holdings.now(marked), smaps("self", "Private_Dirty")
        for _ in range(num_kills // NUM_TOGETHER):
            replace_all()
        eventually(
            lambda: Holdings.now(marked) == before,
            WAIT_S,
            lambda: (before, Holdings.now(marked)),
        )
        # Counters and slabs of the workers, and of the last ones whose rollouts were not taken yet.
        assert num_shared() - shared_before <= 8 * NUM_TOGETHER
        grown = smaps("self", "Private_Dirty") - used
        print(f"{num_kills} kills: {grown / 2**20:+.1f} MiB")
        assert grown < most_mib * 2**20
        marked.note()
    assert marked.gone(WAIT_S), marked.left()
