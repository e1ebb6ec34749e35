"""Finds problems in the reports of ranks. Nothing here touches the system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distcollect.commands.doctor.host_report import FILES, FILES_PER_WORKER, SHM, HostReport

_MIN_SHM_BYTES = 256 << 20


class Finding(NamedTuple):
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


def check_versions(reports: Sequence[HostReport]) -> Iterator[Finding]:
    """Check that all ranks have the trainer's Gymnasium; with others that differ, none joins."""
    wanted = reports[0].gymnasium
    for report in reports[1:]:
        if report.gymnasium.split(".")[:2] != wanted.split(".")[:2]:
            problem = f"its gymnasium is {report.gymnasium}, the trainer's is {wanted}"
            yield Finding("versions", report.where, problem, "install the same on all hosts")


def check_host(report: HostReport, num_hosts: int, num_workers: int) -> Iterator[Finding]:
    """Check what a rank found on its own host, for a run of this size."""
    checks = [*_interface(report), *_limits(report, num_workers)]
    if num_hosts > 1 and not report.knows_itself:
        checks += _own_name(report)
    for topic, problem, remedy in checks:
        yield Finding(topic, report.where, problem, remedy)


def _limits(report: HostReport, num_workers: int) -> Iterator[tuple[str, str, str]]:
    """Check open files and memory; topic, problem and remedy."""
    needed = FILES + FILES_PER_WORKER * (num_workers if report.rank == 0 else 1)
    if 0 <= report.max_files < needed:
        problem = (
            f"it may have {report.max_files} files open; with {num_workers} worker(s) some "
            f"{needed} are needed"
        )
        remedy = f"ulimit -Hn {max(needed, 4096)} before it is started"
        yield "files", problem, f"{remedy} (or LimitNOFILE, nofile in limits.conf)"
    if 0 <= report.shm_bytes < _MIN_SHM_BYTES:
        problem = (
            f"{SHM} has {report.shm_bytes >> 20} MB free, which AsyncVectorEnv and DataLoader put "
            "their data into (distcollect itself doesn't)"
        )
        yield "memory", problem, "give the container more: docker run --shm-size=2g"


def _interface(report: HostReport) -> Iterator[tuple[str, str, str]]:
    """Check that no variable names a wrong interface."""
    for name, value in report.variables.items():
        # NCCL allows a list, with "=" before an exact name and "^" before an excluded one.
        wanted = tuple(part.lstrip("=") for part in value.split(",") if not part.startswith("^"))
        if wanted and not any(known.startswith(wanted) for known in report.interfaces):
            # The host's interfaces aren't named here: hosts differ, and one mistake is one problem.
            problem = f"{name}={value}, but the host has no such interface (ip -br link)"
            remedy = f"unset {name}: distcollect uses the interface that leads to the trainer"
            yield "interface", problem, remedy


def _own_name(report: HostReport) -> Iterator[tuple[str, str, str]]:
    """Say what to do where a host's own name stands for no address that other hosts can reach."""
    problem = (
        f"on it, its own name {report.host!r} stands for none of its addresses that other hosts "
        "can reach: torchrun may not know the host of its rendezvous by it, and groups of your own "
        "would listen elsewhere"
    )
    remedy = (
        f"in its /etc/hosts, give {report.host} the address {report.address}; or start torchrun "
        f"there with --local-addr={report.address}, on the host of the rendezvous with --rdzv-conf "
        f"is_host=1 as well, and set GLOO_SOCKET_IFNAME={report.interface} for groups of your own"
    )
    yield "names", problem, remedy


def check_sharing(trainer: HostReport, report: HostReport, *, mapped: bool) -> Iterator[Finding]:
    """Check that the trainer can map the memory of a rank on its host."""
    if not mapped and report.host_id == trainer.host_id:
        problem = "it is on the trainer's host, but the trainer may not map its memory: rollouts "
        remedy = (
            "run both as the same user, in one container; and see "
            "/proc/sys/kernel/yama/ptrace_scope, hidepid and seccomp"
        )
        yield Finding("memory", report.where, f"{problem}are sent", remedy)
