"""Workers run on the cores they were given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.judge_state import StateEnv

import distcollect as dc
from distcollect.launch.cpu_placement import CpuPlacement


def test_a_worker_runs_where_it_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its threads; it sees all GPUs that its parent sees: the user distributes them."""
    core = max(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        "distcollect.launch.worker_hosts.choose", lambda *_, **__: CpuPlacement((core,), 3)
    )
    with dc.RPCDataCollector(StateEnv, frames_per_batch=4, num_workers=1) as collector:
        collector.next()
        [state], [pid] = collector.call("process_state")[0], collector.call("getpid")[0]
        threads = [int(folder.name) for folder in Path(f"/proc/{pid}/task").iterdir()]
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}] * len(threads)
    assert state["torch threads"] == 3
    assert state["environment"]["CUDA_VISIBLE_DEVICES"] == "5,7"
