"""On which cores of its host a worker runs, and with how many threads of torch's.

Nobody knows here what else the machine does, and a core that two runs take for their own is worse
than none. So a worker is kept to whole NUMA nodes, where its memory is near, and never to single
cores; where there is one node, it is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PIN = "DISTCOLLECT_PIN"
_USERS_OWN = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_CGROUPS = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Host:
    """What this process may use of its host.

    Attributes:
        cores: it may run on.
        quota: CPU seconds in a second that its cgroup grants; None: no limit.
        nodes: the cores of each NUMA node; none where that isn't known.
        online: cores that the host, or the container, has.
    """

    cores: tuple[int, ...]
    quota: float | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    online: int = 0

    @classmethod
    def look(cls) -> Host:
        """This one."""
        return cls(
            cores=tuple(sorted(os.sched_getaffinity(0))),
            quota=read_quota(),
            nodes=read_nodes(),
            online=_num_granted() or os.cpu_count() or 1,
        )

    @property
    def num_cores(self) -> int:
        """Cores' worth of computing, at least 1."""
        if self.quota is None:
            return len(self.cores)
        return max(1, min(len(self.cores), int(self.quota)))


@dataclass(frozen=True)
class CpuPlacement:
    """A worker's.

    Attributes:
        cores: to run on; None: as its parent.
        num_threads: of torch's.
    """

    cores: tuple[int, ...] | None
    num_threads: int


def choose(
    host: Host, index: int, count: int, *, may_pin: bool, cores: int | None = None
) -> CpuPlacement:
    """The place of one of ``count`` workers that share ``host``.

    Args:
        host: see above.
        index: which of them, from 0.
        count: how many there are.
        may_pin: whether it may be kept to some of the cores.
        cores: what the scheduler has set aside for each of them; None: nothing.
    """
    # One thread each unless cores are a worker's own: policies see few envs at a time, and a second
    # thread that has to wait for a core, as the trainer computes too, holds the first one up at
    # every operation. With one worker beside a training trainer on two cores, two threads cost nine
    # tenths of the frames and more.
    threads = min(cores or 1, host.num_cores)
    # Somebody has chosen cores already; or has less to give than there are, wherever that is.
    chosen = len(host.cores) < host.online or host.num_cores < len(host.cores)
    if not may_pin or chosen or count > len(host.cores):
        return CpuPlacement(None, threads)
    near = [usable for node in host.nodes if (usable := sorted(set(node) & set(host.cores)))]
    in_order = [core for node in near for core in node]
    first, end = (i * len(in_order) // count for i in (index, index + 1))
    mine = [core for node in near if set(node) & set(in_order[first:end]) for core in node]
    if not mine or len(mine) == len(host.cores):
        return CpuPlacement(None, threads)
    return CpuPlacement(tuple(mine), min(threads, len(mine)))


def may_pin(env: Mapping[str, str], *, threads_by_launcher: bool = False) -> bool:
    """Whether the user has left it to us where workers run.

    Args:
        env: environment variables.
        threads_by_launcher: torchrun may have set OMP_NUM_THREADS, to 1, where the user hadn't.
    """
    threads = env.get("OMP_NUM_THREADS")
    if threads is not None and not (threads_by_launcher and threads == "1"):
        return False
    return env.get(PIN) != "0" and not any(name in env for name in _USERS_OWN)


def num_cores() -> int:
    """CPU cores' worth of computing that this process may use."""
    return Host.look().num_cores


def read_cores(text: str) -> tuple[int, ...]:
    """The cores of a list of the kernel's: "0-2,8" gives 0, 1, 2, 8."""
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


def read_quota(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPU seconds in a second that this process's cgroup, or one that has it, grants."""
    grants = []
    for folder in _folders(root, membership, "cpu"):
        try:
            if (file := folder / "cpu.max").exists():
                quota, period = file.read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text()
        except OSError:
            continue
        if quota not in ("max", "-1"):
            grants.append(int(quota) / int(period))
    return min(grants, default=None)


def _num_granted() -> int:
    """Cores that the cgroup of this process has; 0: it doesn't say."""
    for folder in _folders(_CGROUPS, Path("/proc/self/cgroup"), "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            try:
                if cores := read_cores((folder / name).read_text()):
                    return len(cores)
            except OSError:
                continue
    return 0


def _folders(root: Path, membership: Path, controller: str) -> Sequence[Path]:
    """Those of this process's cgroup and of those around it, the innermost first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return ()
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree, version 1 one for each controller.
        top = root / controllers if controllers else root
        inside = top / path.lstrip("/")
        # In a container the path may be the outside's, and what is mounted is the inside.
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(top)]
    return found
