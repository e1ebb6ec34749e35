"""Finds problems in the reports of ranks. Nothing here touches the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from distcollect.commands.doctor.capacity import FILES, FILES_PER_WORKER
from distcollect.commands.doctor.host_report import SHM, HostReport

# Ranks must agree in so many parts of a version; the others may differ.
_PARTS = 2
_MUST_MATCH = ("python", "torch", "tensordict", "gymnasium", "distcollect")
_MIN_SHM_BYTES = 256 << 20
_MAX_SKEW_S = 1.0
_MAX_IDLE_CORES = 0.1


@dataclass(frozen=True)
class Finding:
    """A problem.

    Attributes:
        topic: what was checked, in a word.
        where: the rank or link that has the problem.
        problem: what is wrong.
        remedy: what to do about it.
    """

    topic: str
    where: str
    problem: str
    remedy: str


def check_versions(reports: Sequence[HostReport]) -> list[Finding]:
    """Check that all ranks have the trainer's versions."""
    found = []
    trainer = reports[0]
    for report in reports[1:]:
        for name in _MUST_MATCH:
            mine, theirs = trainer.versions[name], report.versions[name]
            if _short(mine) != _short(theirs):
                found.append(
                    Finding(
                        "versions",
                        report.where,
                        f"its {name} is {theirs}, the trainer's is {mine}",
                        "install the same version on all hosts "
                        "(pip install -c constraints/tested.txt)",
                    )
                )
    return found


def _short(version: str) -> str:
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:_PARTS])


def check_torch(report: HostReport) -> list[Finding]:
    """Check that torch has the private parts that joining and leaving workers need."""
    if not report.missing:
        return []
    return [
        Finding(
            "torch",
            report.where,
            f"torch {report.versions['torch']} lacks {', '.join(report.missing)}",
            "use the torch version that constraints/tested.txt names",
        )
    ]


def check_interface(report: HostReport) -> list[Finding]:
    """Check that a rank's interface exists, and that no variable names a wrong one."""
    found = []
    for name, value in report.variables.items():
        # NCCL allows a list, with "=" before an exact name and "^" before an excluded one.
        wanted = [part.lstrip("=") for part in value.split(",") if not part.startswith("^")]
        known = [i for i in report.interfaces if any(i.startswith(part) for part in wanted)]
        if wanted and not known:
            found.append(
                Finding(
                    "interface",
                    report.where,
                    f"{name}={value}, but the host's interfaces are {', '.join(report.interfaces)}",
                    f"unset {name}: distcollect uses the interface that leads to the trainer",
                )
            )
    has = report.interfaces.get(report.interface, [])
    if report.interface not in ("", "lo") and has and has[0] != report.address:
        found.append(
            Finding(
                "interface",
                report.where,
                f"its address is {report.address}, but torch's RPC listens on {has[0]}, the "
                f"first address of {report.interface}",
                f"make {report.address} the first address of {report.interface}, or let the "
                f"launch use the network of {has[0]}",
            )
        )
    if not report.interface:
        found.append(
            Finding(
                "interface",
                report.where,
                f"none of its interfaces has its address {report.address}",
                "set TP_SOCKET_IFNAME to the interface that leads to the trainer",
            )
        )
    return found


def check_name(report: HostReport, num_hosts: int) -> list[Finding]:
    """Check that a host's own name resolves to an address that other hosts can use."""
    if num_hosts == 1 or any(not ip_address(_plain(a)).is_loopback for a in report.own_name):
        return []
    addresses = ", ".join(report.own_name) or "nothing"
    return [
        Finding(
            "names",
            report.where,
            f"on it, its own name {report.host!r} resolves to {addresses}: torchrun may not know "
            "the host of its rendezvous by it, and groups of your own would listen there",
            f"in its /etc/hosts, give {report.host} the address {report.address}; or start "
            f"torchrun there with --local-addr={report.address}, on the host of the rendezvous "
            "with --rdzv-conf is_host=1 as well, and set "
            f"GLOO_SOCKET_IFNAME={report.interface} for groups of your own",
        )
    ]


def _plain(address: str) -> str:
    return address.partition("%")[0]


def check_ports(report: HostReport) -> list[Finding]:
    """Check that a rank can listen on its address."""
    if "ports" not in report.problems:
        return []
    return [
        Finding(
            "ports",
            report.where,
            report.problems["ports"],
            "MASTER_ADDR or DISTCOLLECT_LISTEN must name an address of this host on a private "
            "network",
        )
    ]


def check_files(report: HostReport, num_workers: int) -> list[Finding]:
    """Check that a rank may open as many files as a run of this size needs."""
    needed = FILES + FILES_PER_WORKER * (num_workers if report.rank == 0 else 1)
    if report.max_files < 0 or report.max_files >= needed:
        return []
    return [
        Finding(
            "files",
            report.where,
            f"it may have {report.max_files} files open; with {num_workers} worker(s) some "
            f"{needed} are needed",
            f"ulimit -Hn {max(needed, 4096)} before it is started (or LimitNOFILE, nofile in "
            "limits.conf)",
        )
    ]


def check_memory(report: HostReport) -> list[Finding]:
    """Check that a rank can share memory with processes of its host."""
    found = []
    if "memory" in report.problems:
        found.append(
            Finding(
                "memory",
                report.where,
                f"it can't make memory that others map: {report.problems['memory']}",
                "raise its memory limit; until then rollouts and weights are sent, not shared",
            )
        )
    if 0 <= report.shm_bytes < _MIN_SHM_BYTES:
        found.append(
            Finding(
                "memory",
                report.where,
                f"{SHM} has {report.shm_bytes >> 20} MB free, which AsyncVectorEnv and "
                "DataLoader put their data into (distcollect itself doesn't)",
                "give the container more: docker run --shm-size=2g",
            )
        )
    return found


def check_clock(where: str, skew_s: float) -> list[Finding]:
    """Check that a rank's clock agrees with the trainer's."""
    if abs(skew_s) <= _MAX_SKEW_S:
        return []
    return [
        Finding(
            "clocks",
            where,
            f"its clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the "
            "trainer's: times in logs and files of a run can't be compared",
            "let NTP or chrony set the clocks of all hosts",
        )
    ]


def check_idle(where: str, cores: float) -> list[Finding]:
    """Check that a rank uses no CPU time while it waits."""
    if cores <= _MAX_IDLE_CORES:
        return []
    return [
        Finding(
            "idle",
            where,
            f"its process uses {cores:.2f} of a core while it waits",
            "something in it polls: look for threads started by sitecustomize, by a profiler or by "
            "another RPC framework",
        )
    ]


def check_near(trainer: HostReport, report: HostReport, *, shares_memory: bool) -> list[Finding]:
    """Check that the trainer can map the memory of a rank on its own host."""
    if shares_memory or report.host_id != trainer.host_id:
        return []
    return [
        Finding(
            "memory",
            report.where,
            "it is on the trainer's host, but the trainer may not map its memory: rollouts are "
            "sent",
            "run both as the same user, in one container; and see "
            "/proc/sys/kernel/yama/ptrace_scope, hidepid and seccomp",
        )
    ]
