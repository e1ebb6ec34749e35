"""Workers that Ray starts beside the same workers without Ray."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.alternating import ratio_of_pairs
from benchmarks.contenders import NUM_WORKERS, Values
from benchmarks.workloads import WORKLOADS
from distcollect import Monitor, RayDataCollector, RPCDataCollector


def run_beside_local(seconds: float, *, name: str) -> Values:
    """Frames/s of two workers that Ray starts over that of two local ones, in turns.

    In sync mode: so the workers of one collector do nothing while the other one's collect.
    """
    workload = WORKLOADS[name]
    given: dict[str, Any] = {
        "create_env_fn": workload.make_env,
        "policy": workload.make_policy(),
        "frames_per_batch": workload.rollout_frames * NUM_WORKERS,
        "envs_per_worker": workload.num_envs,
        "num_workers": NUM_WORKERS,
        "sync": True,
        "monitor": Monitor(view=False),
    }
    ray = {"num_cpus": NUM_WORKERS, "include_dashboard": False}
    with (
        RPCDataCollector(**given) as local,
        RayDataCollector(**given, ray_init_config=ray) as placed,
    ):
        ratio, pairs = ratio_of_pairs(local.next, placed.next, seconds, clock=time.perf_counter)
    return {"speed_ratio": ratio, "pairs": pairs}
