"""What a rank finds out about the host that it runs on."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import gymnasium

from distcollect.common import open_files
from distcollect.common.cgroups import read_free_bytes
from distcollect.common.memory_segment import namespace
from distcollect.launch.cpu_placement import Host
from distcollect.net.interfaces import interface_of, interfaces, own_address_of
from distcollect.transport.start import RPC, RPC_PORTS

# Each names a network interface: for torch's RPC, Gloo and NCCL.
INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SHM = "/dev/shm"  # noqa: S108 - only looked at
# What a worker takes on its own host: its memory without envs and policy, when it is forked by its
# trainer (measured with torch 2.13 and 64 workers).
MEMORY_PER_WORKER = 32 << 20
# A trainer that broadcasts to n workers used 145 + 9.5 n open files, and each worker 143. Envs may
# need some too.
FILES, FILES_PER_WORKER = 256, 16


@dataclass(frozen=True)
class HostReport:
    """What a rank found; plain values, so that it travels as JSON.

    Attributes:
        rank: its rank in the launch.
        host: its host's name.
        host_id: equal for ranks that share network interfaces and process ids.
        gymnasium: the version of it.
        interfaces: those of its host.
        address: the address by which the others reach it.
        interface: the interface that has this address; "" if none has.
        knows_itself: whether its host's name stands there for an address that others can reach.
        variables: those of :data:`INTERFACE_VARIABLES` that are set.
        max_files: how many files it may have open.
        num_cores: how many cores it may use.
        shm_bytes: free bytes in /dev/shm; -1: there is no /dev/shm.
        free_bytes: of memory that it and its children can still get; -1: not known.
        num_ports: how many ports its host gives to those who ask for any; -1: not known.
        ports_per_worker: that a worker takes there.
    """

    rank: int
    host: str
    host_id: str
    gymnasium: str
    interfaces: list[str]
    address: str
    interface: str
    knows_itself: bool
    variables: dict[str, str]
    max_files: int
    num_cores: int
    shm_bytes: int
    free_bytes: int = -1
    num_ports: int = -1
    ports_per_worker: int = 1

    @property
    def where(self) -> str:
        """This rank and its host, in words."""
        return f"rank {self.rank} ({self.host})"

    @property
    def capacity(self) -> dict[str, int]:
        """Map each limit of its host to the workers that it can serve by it; -1: not known."""
        return {
            "one a core": self.num_cores,
            "memory": self.free_bytes // MEMORY_PER_WORKER,
            "ports": self.num_ports // self.ports_per_worker,
            "files of a trainer there": -1
            if self.max_files < 0
            else max(0, self.max_files - FILES) // FILES_PER_WORKER,
        }


def inspect_host(rank: int, address: str, transport: str) -> HostReport:
    """Inspect the host of this process.

    Args:
        rank: the rank of this process.
        address: the address by which others reach it.
        transport: the name of the one in use.
    """
    return HostReport(
        rank=rank,
        host=platform.node(),
        host_id=f"{namespace('pid')} {namespace('net')}",
        gymnasium=gymnasium.__version__,
        interfaces=list(interfaces()),
        address=address,
        interface=interface_of(address) or "",
        knows_itself=own_address_of(platform.node()) is not None,
        variables={name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ},
        max_files=open_files.highest_limit(),
        num_cores=len(Host.inspect().usable),
        shm_bytes=shutil.disk_usage(SHM).free if os.path.ismount(SHM) else -1,
        free_bytes=read_free_bytes(),
        num_ports=read_num_ports(),
        ports_per_worker=1 + (RPC_PORTS if transport == RPC else 0),  # one to connect from
    )


def read_num_ports(file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """Return how many ports this host gives to those who ask for any; -1 if that is not known."""
    try:
        first, last = map(int, file.read_text().split())
    except (OSError, ValueError):
        return -1
    return last - first + 1
