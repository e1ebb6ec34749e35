"""The cores that a worker process runs on, and the number of threads that torch uses there.

Other runs may use the same machine, and two runs pinned to the same core are slower than without
pinning. So a worker is pinned to whole NUMA nodes, where its memory is near, and never to single
cores. On a host with one node it is not pinned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distcollect.common.cgroups import CGROUPS, MEMBERSHIP, cgroup_folders

PIN = "DISTCOLLECT_PIN"
_AFFINITY_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Host:
    """What this process may use of its host.

    Attributes:
        cores: those it may run on.
        quota: CPU seconds per second that its cgroup grants; None: no limit.
        nodes: the cores of each NUMA node; empty if unknown.
    """

    cores: tuple[int, ...]
    quota: float | None = None
    nodes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def inspect(cls) -> Host:
        """The host that this process runs on."""
        return cls(
            cores=tuple(sorted(os.sched_getaffinity(0))),
            quota=read_quota(),
            nodes=read_nodes(),
        )

    @property
    def usable(self) -> tuple[int, ...]:
        """As many of its cores as it may keep busy, at least one."""
        return self.cores if self.quota is None else self.cores[: max(1, int(self.quota))]


@dataclass(frozen=True)
class CpuPlacement:
    """Where a worker process runs.

    Attributes:
        cores: to run on; None: those of its parent.
        num_threads: for torch to use.
    """

    cores: tuple[int, ...] | None
    num_threads: int


def choose(
    host: Host, index: int, count: int, *, may_pin: bool, cores: int | None = None
) -> CpuPlacement:
    """The placement of one of ``count`` workers that share ``host``.

    Args:
        host: see above.
        index: the worker's number among them, from 0.
        count: how many there are.
        may_pin: whether it may be pinned to some of the cores.
        cores: how many the scheduler reserved for each of them; None: unknown.
    """
    # One thread each, unless a worker has cores of its own: policies see few envs at a time, and
    # while the trainer computes, a second thread waits for a core and delays the first one at every
    # operation. One worker beside a busy trainer on two cores lost over 90% of its frames to that.
    threads = min(cores or 1, len(host.usable))
    in_order = [core for node in host.nodes for core in node]
    # The user, a container or a scheduler has chosen cores already, or limits the CPU time.
    chosen = len(host.usable) < len(in_order)
    if not may_pin or chosen or count > len(in_order):
        return CpuPlacement(None, threads)
    first, end = (i * len(in_order) // count for i in (index, index + 1))
    own = [core for node in host.nodes if set(node) & set(in_order[first:end]) for core in node]
    if len(own) == len(in_order):
        return CpuPlacement(None, threads)
    return CpuPlacement(tuple(own), min(threads, len(own)))


def may_pin(env: Mapping[str, str], *, threads_by_launcher: bool = False) -> bool:
    """Return True if the user's environment variables allow us to pin workers.

    Args:
        env: environment variables.
        threads_by_launcher: OMP_NUM_THREADS=1 may be torchrun's, which sets it if the user didn't.
    """
    threads = env.get("OMP_NUM_THREADS")
    if threads is not None and not (threads_by_launcher and threads == "1"):
        return False
    return env.get(PIN) != "0" and not any(name in env for name in _AFFINITY_VARIABLES)


def num_cores() -> int:
    """Return how many CPU cores this process may keep busy."""
    return len(Host.inspect().usable)


def load(num_cores: int, num_threads: int) -> float:
    """How many threads, beside ``num_threads``, wanted one of these cores in the last minute."""
    num_others = (os.cpu_count() or num_cores) - num_cores  # which may be busy too
    return max(0.0, os.getloadavg()[0] - num_others - num_threads)


def read_cores(text: str) -> tuple[int, ...]:
    """The cores in a list as the kernel writes it: "0-2,8" gives 0, 1, 2, 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def read_nodes(folder: Path = _NODES) -> tuple[tuple[int, ...], ...]:
    """The cores of each NUMA node."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return tuple(read_cores(path.read_text()) for path in lists)


def read_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """CPU seconds per second that this process's cgroup and its ancestors grant; None: no limit."""
    # loky.cpu_count() reads the limit of the root cgroup only, so it misses SLURM's and systemd's;
    # it also rounds up, and does not count the cores of a container. psutil and os know no cgroups.
    grants = []
    for folder in cgroup_folders(root, membership, "cpu"):
        # Of version 2, or of version 1.
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError):
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                if quota not in ("max", "-1"):
                    grants.append(int(quota) / int(period))
    return min(grants, default=None)
