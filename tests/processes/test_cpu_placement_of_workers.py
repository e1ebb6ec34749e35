"""Workers run on the cores they were given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.cgroups import cgroup
from helpers.placement_env import PlacementEnv
from helpers.programs import run_python

import distcollect as dc
from distcollect.launch.cpu_placement import CpuPlacement, num_cores

__all__ = ["cgroup"]


def test_a_real_quota(cgroup: Path) -> None:
    if num_cores() < 2:
        pytest.skip("needs two cores")
    ask = (
        "import os, sys; from pathlib import Path;"
        "Path(sys.argv[1]).write_text(str(os.getpid()));"
        "from distcollect.launch.cpu_placement import num_cores; print(num_cores())"
    )
    assert run_python("-c", ask, cgroup / "cgroup.procs", timeout_s=60).stdout == "1\n"


def test_a_worker_runs_where_it_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers see all GPUs that their parent sees; the user distributes them."""
    core = max(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        "distcollect.launch.worker_hosts.choose", lambda *_, **__: CpuPlacement((core,), 3)
    )
    with dc.RPCDataCollector(PlacementEnv, frames_per_batch=4, total_frames=4, num_workers=1) as c:
        [batch] = c
    told = batch["observation"][0, 0].tolist()
    assert told == [1, core, 1, 3, 57]  # see PlacementEnv
