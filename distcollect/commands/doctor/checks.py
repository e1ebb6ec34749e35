"""What is wrong with what was found, and what to do about it. Nothing here touches the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from distcollect.commands.doctor.host_report import SHM, HostReport

# Both are where all ranks have to agree; the rest of a version may differ.
_PARTS = 2
_MUST_MATCH = ("python", "torch", "tensordict", "gymnasium", "distcollect")
# A trainer that broadcasts to n workers was seen to use 145 + 9.5 n descriptors, each of them 143.
# Envs may need some too.
FILES, FILES_PER_WORKER = 256, 16
_MIN_SHM_BYTES = 256 << 20
_MAX_SKEW_S = 1.0
_MAX_IDLE_CORES = 0.1


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        topic: a word for what was looked at.
        where: which rank or link.
        problem: what is wrong.
        remedy: what to do about it.
    """

    topic: str
    where: str
    problem: str
    remedy: str


def check_versions(surveys: Sequence[HostReport]) -> list[Finding]:
    """All ranks have the trainer's."""
    found = []
    trainer = surveys[0]
    for survey in surveys[1:]:
        for name in _MUST_MATCH:
            mine, theirs = trainer.versions[name], survey.versions[name]
            if _short(mine) != _short(theirs):
                found.append(
                    Finding(
                        "versions",
                        survey.where,
                        f"its {name} is {theirs}, the trainer's is {mine}",
                        "install the same version on all hosts (pip install -c constraints.txt)",
                    )
                )
    return found


def _short(version: str) -> str:
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:_PARTS])


def check_torch(survey: HostReport) -> list[Finding]:
    """It has the private parts that RPC with joining and leaving workers needs."""
    if not survey.missing:
        return []
    return [
        Finding(
            "torch",
            survey.where,
            f"torch {survey.versions['torch']} lacks {', '.join(survey.missing)}",
            "use a torch version that distcollect's constraints.txt names",
        )
    ]


def check_interface(survey: HostReport) -> list[Finding]:
    """The interface that was chosen is there, and nothing overrides it wrongly."""
    found = []
    for name, value in survey.variables.items():
        # NCCL's may be a list, with "=" for an exact name and "^" for one that is not meant.
        wanted = [part.lstrip("=") for part in value.split(",") if not part.startswith("^")]
        known = [i for i in survey.interfaces if any(i.startswith(part) for part in wanted)]
        if wanted and not known:
            found.append(
                Finding(
                    "interface",
                    survey.where,
                    f"{name}={value}, but the host's interfaces are {', '.join(survey.interfaces)}",
                    f"unset {name}: distcollect takes the interface that leads to the trainer",
                )
            )
    has = survey.interfaces.get(survey.interface, [])
    if survey.interface not in ("", "lo") and has and has[0] != survey.address:
        found.append(
            Finding(
                "interface",
                survey.where,
                f"it is reached by {survey.address}, but torch's RPC listens on {has[0]}, the "
                f"first address of {survey.interface}",
                f"make {survey.address} the first address of {survey.interface}, or let the "
                f"launch meet on the network of {has[0]}",
            )
        )
    if not survey.interface:
        found.append(
            Finding(
                "interface",
                survey.where,
                f"none of its interfaces has its address {survey.address}",
                "set TP_SOCKET_IFNAME to the interface that leads to the trainer",
            )
        )
    return found


def check_name(survey: HostReport, num_hosts: int) -> list[Finding]:
    """Its host's own name stands for an address that others can use."""
    if num_hosts == 1 or any(not ip_address(_plain(a)).is_loopback for a in survey.own_name):
        return []
    stands_for = ", ".join(survey.own_name) or "nothing"
    return [
        Finding(
            "names",
            survey.where,
            f"on it, its own name {survey.host!r} stands for {stands_for}: torchrun may not know "
            "the host of its rendezvous by it, and groups of your own would listen there",
            f"in its /etc/hosts, give {survey.host} the address {survey.address}; or start "
            f"torchrun there with --local-addr={survey.address}, on the host of the rendezvous "
            "with --rdzv-conf is_host=1 as well, and set "
            f"GLOO_SOCKET_IFNAME={survey.interface} for groups of your own",
        )
    ]


def _plain(address: str) -> str:
    return address.partition("%")[0]


def check_ports(survey: HostReport) -> list[Finding]:
    """It can listen on its address."""
    if "ports" not in survey.problems:
        return []
    return [
        Finding(
            "ports",
            survey.where,
            survey.problems["ports"],
            "MASTER_ADDR or DISTCOLLECT_LISTEN has to name an address of this host's own, on a "
            "private network",
        )
    ]


def check_files(survey: HostReport, num_workers: int) -> list[Finding]:
    """It may open as many descriptors as a run of this size needs."""
    needed = FILES + FILES_PER_WORKER * (num_workers if survey.rank == 0 else 1)
    if survey.max_files < 0 or survey.max_files >= needed:
        return []
    return [
        Finding(
            "files",
            survey.where,
            f"it may have {survey.max_files} files open; with {num_workers} worker(s) some "
            f"{needed} are needed",
            f"ulimit -n {max(needed, 4096)} before it is started (or LimitNOFILE, nofile in "
            "limits.conf)",
        )
    ]


def check_memory(survey: HostReport) -> list[Finding]:
    """It can share memory with processes of its host."""
    found = []
    if "memory" in survey.problems:
        found.append(
            Finding(
                "memory",
                survey.where,
                f"it can't make memory that others map: {survey.problems['memory']}",
                "raise its memory limit; rollouts and weights are sent to and from it meanwhile",
            )
        )
    if 0 <= survey.shm_bytes < _MIN_SHM_BYTES:
        found.append(
            Finding(
                "memory",
                survey.where,
                f"{SHM} has {survey.shm_bytes >> 20} MB free, which AsyncVectorEnv and "
                "DataLoader put their data into (distcollect itself doesn't)",
                "give the container more: docker run --shm-size=2g",
            )
        )
    return found


def check_clock(where: str, skew_s: float) -> list[Finding]:
    """Its clock is the trainer's."""
    if abs(skew_s) <= _MAX_SKEW_S:
        return []
    return [
        Finding(
            "clocks",
            where,
            f"its clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the "
            "trainer's: logs and files of a run will be in no order",
            "let NTP or chrony set the clocks of all hosts",
        )
    ]


def check_idle(where: str, cores: float) -> list[Finding]:
    """Waiting costs nothing."""
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


def check_near(trainer: HostReport, survey: HostReport, *, is_near: bool) -> list[Finding]:
    """On the trainer's own host its memory can be mapped."""
    if is_near or survey.host_id != trainer.host_id:
        return []
    return [
        Finding(
            "memory",
            survey.where,
            "it is on the trainer's host, but the trainer may not map its memory: rollouts are "
            "sent",
            "run both as the same user, in one container; and see "
            "/proc/sys/kernel/yama/ptrace_scope, hidepid and seccomp",
        )
    ]
