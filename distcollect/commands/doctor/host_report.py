"""What a rank finds out about the host that it runs on."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import numpy as np
import tensordict
import torch

from distcollect.commands.doctor.capacity import Capacity, capacity, read_free_bytes, read_num_ports
from distcollect.common import open_files
from distcollect.common.shared_memory import allocate
from distcollect.errors import LaunchError
from distcollect.launch.cpu_placement import Host
from distcollect.net.interfaces import interface_of, interfaces, listen
from distcollect.transport.start import missing_parts
from distcollect.version import __version__

# Each names a network interface: for torch's RPC, Gloo and NCCL.
INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SHM = "/dev/shm"  # noqa: S108 - only looked at


@dataclass(frozen=True)
class HostReport:
    """What a rank found; plain values, so that it travels as JSON.

    Attributes:
        rank: its rank in the launch.
        host: its host's name.
        host_id: equal for ranks that share network interfaces and process ids.
        pid: its process id.
        versions: versions of Python and of packages, by name.
        missing: the parts of torch that distcollect needs and this torch lacks.
        interfaces: maps each interface of its host to its addresses.
        address: the address by which the others reach it.
        interface: the interface that has this address; "" if none has.
        own_name: the addresses that its host's name resolves to on this host.
        variables: those of :data:`INTERFACE_VARIABLES` that are set.
        max_files: how many files it may have open.
        open_files: how many files it has open.
        num_cores: how many cores it may use.
        shm_bytes: free bytes in /dev/shm; -1: there is no /dev/shm.
        free_bytes: of memory that it and its children can still get; -1: not known.
        num_ports: how many ports its host gives to those who ask for any; -1: not known.
        problems: what it tried and could not do, by topic.
    """

    rank: int
    host: str
    host_id: str
    pid: int
    versions: dict[str, str]
    missing: list[str]
    interfaces: dict[str, list[str]]
    address: str
    interface: str
    own_name: list[str]
    variables: dict[str, str]
    max_files: int
    open_files: int
    num_cores: int
    shm_bytes: int
    free_bytes: int = -1
    num_ports: int = -1
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """This rank and its host, in words."""
        return f"rank {self.rank} ({self.host})"

    @property
    def capacity(self) -> Capacity:
        """How many workers its host can serve."""
        return capacity(
            num_cores=self.num_cores,
            free_bytes=self.free_bytes,
            num_ports=self.num_ports,
            max_files=self.max_files,
        )


def inspect_host(rank: int, address: str) -> HostReport:
    """Inspect the host of this process.

    Args:
        rank: the rank of this process.
        address: the address by which others reach it.
    """
    problems: dict[str, str] = {}
    _attempt(problems, "ports", lambda: listen(address).close())
    _attempt(problems, "memory", _share_memory)
    return HostReport(
        rank=rank,
        host=platform.node(),
        host_id=_host_id(),
        pid=os.getpid(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tensordict": tensordict.__version__,
            "gymnasium": gymnasium.__version__,
            "numpy": np.__version__,
            "distcollect": __version__,
        },
        missing=missing_parts(),
        interfaces=interfaces(),
        address=address,
        interface=interface_of(address) or "",
        own_name=addresses_of(platform.node()),
        variables={name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ},
        max_files=open_files.highest_limit(),
        open_files=num_open_files(),
        num_cores=Host.inspect().num_cores,
        shm_bytes=shutil.disk_usage(SHM).free if os.path.ismount(SHM) else -1,
        free_bytes=read_free_bytes(),
        num_ports=read_num_ports(),
        problems=problems,
    )


def addresses_of(name: str) -> list[str]:
    """The addresses that ``name`` resolves to on this host; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def num_open_files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count


def cpu_s() -> float:
    """CPU time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _attempt(problems: dict[str, str], topic: str, work: Callable[[], None]) -> None:
    try:
        work()
    except (LaunchError, OSError) as error:
        problems[topic] = str(error)


def _share_memory() -> None:
    allocate(1 << 20)


def _host_id() -> str:
    """An id of this host; containers with their own network or processes count as hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid"))
    return " ".join([boot, *spaces])
