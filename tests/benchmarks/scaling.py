"""Many workers whose envs sleep in each step."""

from __future__ import annotations

from dataclasses import replace

import distcollect as dc
from benchmarks.contenders import arguments, counted
from benchmarks.items import Values
from benchmarks.windows import frames_per_s
from benchmarks.workloads import SLEEPING

_RANDOM_STEPS = 128


def run(seconds: float, *, num_workers: int, random: bool) -> Values:
    """The "frames_per_s" of ``num_workers`` workers together.

    ``random``: they have no policy, and longer rollouts. The policy of the workload takes several
    times as much CPU as all else, so that a small machine shows little but that.
    """
    workload = replace(SLEEPING, num_steps=_RANDOM_STEPS) if random else SLEEPING
    given = arguments(workload, num_workers=num_workers)
    if random:
        given["policy"] = None
    with dc.RPCDataCollector(**given) as collector:
        return {"frames_per_s": frames_per_s(counted(collector), seconds)}
