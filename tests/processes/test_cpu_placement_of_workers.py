"""Workers run on the cores they were given, and the trainer keeps none of these busy."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from helpers.judge_state import StateEnv
from torch import nn

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


class LargePolicy(nn.Module):
    """Has weights of 2 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.large = nn.Linear(4, 2), nn.Parameter(torch.zeros(500_000))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.linear(observation).argmax(-1)


def test_no_thread_of_ours_uses_torch_s_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would get threads of its own, which wait in a loop on the cores of workers."""
    num_threads = torch.get_num_threads()
    monkeypatch.setenv("DISTCOLLECT_TRANSPORT", "tcp")

    def num_native() -> int:
        return len([*Path("/proc/self/task").iterdir()]) - threading.active_count()

    try:
        torch.set_num_threads(4)
        torch.ones(1_000_000).add_(1)  # the user's thread has them
        before = num_native()
        policy = LargePolicy()
        with dc.MultiaSyncDataCollector(
            "CartPole-v1", policy, frames_per_batch=1024, num_workers=2, envs_per_worker=16
        ) as collector:
            for _ in range(4):
                assert collector.next() is not None
                collector.update_policy_weights_(policy)
            assert num_native() <= before
    finally:
        torch.set_num_threads(num_threads)
