"""The limit: bare loops, those of ``distcollect bench``.

For W workers, W of them run side by side, in a process each, and their rates are summed: the rate
of W workers whose communication costs nothing.
"""

from __future__ import annotations

from benchmarks.items import Values
from benchmarks.workloads import WORKLOADS, Workload
from distcollect.commands.bench import BareLoop, loop_processes


def bare_loop(workload: Workload) -> BareLoop:
    """A bare loop in this process."""
    sizes = workload.num_envs, workload.num_steps
    return BareLoop(workload.make_env, workload.make_policy, *sizes)


def run_bare(seconds: float, *, name: str, num_processes: int) -> Values:
    """Measure bare loops side by side; their frames/s together."""
    workload = WORKLOADS[name]
    makers = workload.make_env, workload.make_policy
    sizes = num_processes, workload.num_envs, workload.num_steps
    with loop_processes(*makers, *sizes) as window:
        return {"frames_per_s": window(seconds)}
