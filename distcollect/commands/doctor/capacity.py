"""How many workers a host can serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distcollect.launch.cpu_placement import cgroup_folders

# What a worker takes on its own host: the ports on which torch's RPC listens, and one for the
# control connection; and its memory without envs and policy, when it is forked by its trainer
# (measured with torch 2.13 and 64 workers).
PORTS_PER_WORKER = 18
MEMORY_PER_WORKER = 32 << 20
# A trainer that broadcasts to n workers used 145 + 9.5 n open files, and each worker 143. Envs may
# need some too.
FILES, FILES_PER_WORKER = 256, 16


@dataclass(frozen=True)
class Capacity:
    """What limits the number of workers, each by itself.

    Attributes:
        cores: one worker for each core, as for envs that compute all the time.
        memory: workers on the host, by its free memory.
        ports: workers on the host, by the ports that it gives to those who ask for any.
        files: workers of a trainer here, on whichever hosts, by the files that it may open.
    """

    cores: int
    memory: int
    ports: int
    files: int


def capacity(*, num_cores: int, free_bytes: int, num_ports: int, max_files: int) -> Capacity:
    """How many workers a host can serve; -1 where that is not known.

    Args:
        num_cores: that a process on it may use.
        free_bytes: of memory; -1: not known.
        num_ports: that it gives to those who ask for any; -1: not known.
        max_files: that a process on it may have open; -1: not known.
    """

    def among(total: int, each: int) -> int:
        return -1 if total < 0 else total // each

    return Capacity(
        cores=num_cores,
        memory=among(free_bytes, MEMORY_PER_WORKER),
        ports=among(num_ports, PORTS_PER_WORKER),
        files=-1 if max_files < 0 else max(0, max_files - FILES) // FILES_PER_WORKER,
    )


def read_num_ports(file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """How many ports this host gives to those who ask for any; -1 if that is not known."""
    try:
        first, last = map(int, file.read_text().split())
    except (OSError, ValueError):
        return -1
    return last - first + 1


def read_free_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """The memory that this process and its children can still get; -1 if that is not known."""
    free = []
    try:
        lines = meminfo.read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for folder in cgroup_folders(cgroups, membership, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                granted = (folder / limit).read_text().strip()
                if granted != "max":
                    free.append(int(granted) - int((folder / used).read_text()))
            except (OSError, ValueError):
                continue
    return max(0, min(free)) if free else -1
