"""The command ``doctor``: inspects all ranks of a launch and says what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from distcollect.commands.argtypes import above_0, declare
from distcollect.commands.doctor import checks, report
from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport, inspect_host
from distcollect.commands.doctor.ranks import DoctorHello, Link, Ranks, take_part
from distcollect.errors import DistCollectError, LaunchError
from distcollect.integrations.ray.cluster import ADDRESS as RAY_ADDRESS
from distcollect.integrations.ray.doctor_nodes import RayNodes
from distcollect.launch.rendezvous import (
    LISTEN,
    ListenSpec,
    finder,
    host_and_port,
    listen_address,
    listen_spec,
    read_token,
)
from distcollect.launch.run_folder import TOKEN_VARIABLE
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.client import join
from distcollect.net.interfaces import LOOPBACK
from distcollect.net.messages import TrainerAddress
from distcollect.net.server import JoinServer

_IDLE_S = 1.0
_MAX_HOSTS = 6  # with more, pairs of hosts are not measured
_TOPICS = {
    "versions": "the same on all ranks",
    "torch": "has the private parts that distcollect needs",
    "ranks": "all have joined",
    "interface": "exists, and leads from the workers to the trainer",
    "names": "of the hosts resolve to addresses on the network",
    "ports": "can be listened on",
    "links": "RPC and broadcasts get through",
    "files": "enough can be open at once",
    "memory": "can be shared within a host",
    "idle": "waiting takes no CPU time",
    "clocks": "agree",
}
_OPEN_PORTS = (
    "let the hosts reach each other on all TCP ports from 1024 on, both ways: torch's RPC and Gloo "
    "use any free ports (see /proc/sys/net/ipv4/ip_local_port_range)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Finds problems that would keep a run from working, and says how to solve them. Start it "
        "the way you start your script: torchrun ... -m distcollect doctor, or srun python -m "
        "distcollect doctor. In a job of Ray (ray job submit -- python -m distcollect doctor), or "
        "with RAY_ADDRESS set, it looks at all nodes of the cluster. Without a launcher it checks "
        "only this machine. The exit status is 1 if there is a problem."
    )
    add = partial(declare, parser.add_argument)
    add("--wait SECONDS", "how long to wait for all ranks", type=above_0, default=60.0)
    # The command starts a second process by this when it checks a single machine.
    add("--join HOST:PORT", argparse.SUPPRESS)


def run(given: argparse.Namespace) -> int:
    """Inspect all ranks; 0 if there is no problem, otherwise 1."""
    try:
        return _run(given)
    except LaunchError as error:
        _say(f"distcollect doctor on {platform.node()}: {error}")
        return 1


def _run(given: argparse.Namespace) -> int:
    if given.join is not None:
        trainer = TrainerAddress(*host_and_port("--join", given.join), read_token() or "")
        return _serve_trainer(lambda: trainer, 1, given.wait)
    launch = Launch.detect()
    is_alone = launch.launcher is Launcher.NONE
    if launch.launcher is Launcher.RAY_JOB or (is_alone and RAY_ADDRESS in os.environ):
        return _inspect_ray(launch, given.wait)
    if is_alone:
        listen = ListenSpec(LOOPBACK, 0, secrets.token_hex(16))
        launch = replace(launch, world_size=2)
        return _inspect_all(launch, listen, given.wait, partial(_second_process, listen))
    if launch.rank > 0:
        return _serve_trainer(finder(launch), launch.rank, given.wait)
    others = contextlib.nullcontext()  # the launcher starts them
    return _inspect_all(launch, listen_spec(launch), given.wait, lambda *_: others)


def _inspect_ray(launch: Launch, timeout_s: float) -> int:
    """Inspect this process, and a rank on each node of the Ray cluster."""
    with contextlib.closing(RayNodes()) as nodes:
        _say(nodes.about)
        address, port = listen_address(default=nodes.address)
        listen = ListenSpec(address, port, read_token() or secrets.token_hex(16))
        # Ray knows its nodes by their addresses: what their names stand for doesn't matter.
        launch = replace(launch, launcher=Launcher.RAY_JOB, world_size=1 + len(nodes), num_hosts=1)
        others = partial(nodes.ranks, token=listen.token, timeout_s=timeout_s)
        return _inspect_all(launch, listen, timeout_s, others)


@contextlib.contextmanager
def _second_process(listen: ListenSpec, _: Ranks, port: int) -> Iterator[None]:
    without_file = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-m", "distcollect", "doctor", "--join", f"{listen.address}:{port}"],
        env={**without_file, "DISTCOLLECT_TOKEN": listen.token},
    )
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        process.kill()
        process.wait()


def _serve_trainer(find: Callable[[], TrainerAddress], rank: int, timeout_s: float) -> int:
    control, _ = join(find, DoctorHello(), timeout_s, name=f"rank {rank}")
    return 0 if take_part(control, rank) else 1


def _inspect_all(
    launch: Launch,
    listen: ListenSpec,
    timeout_s: float,
    others: Callable[[Ranks, int], contextlib.AbstractContextManager[None]],
) -> int:
    """Inspect this rank, and those that ``others`` starts, at the port of the trainer."""
    with contextlib.ExitStack() as undo:
        ranks = undo.enter_context(contextlib.closing(Ranks(listen.address, launch.world_size)))
        server = JoinServer(listen.address, listen.token, ranks, listen.port)
        undo.callback(server.close)
        listen.announce(server.port)
        undo.enter_context(others(ranks, server.port))
        undo.callback(ranks.end)
        trainer = inspect_host(0, listen.address)
        ranks.wait(timeout_s)
        return int(_examine(launch, trainer, ranks))


def _examine(launch: Launch, trainer: HostReport, ranks: Ranks) -> bool:
    """Print what was found about all ranks; return True if something is wrong."""
    reports = {0: trainer, **dict(sorted(ranks.reports.items()))}
    is_ray = launch.launcher is Launcher.RAY_JOB
    by = {
        Launcher.NONE: "on this machine",
        Launcher.RAY_JOB: "in the Ray cluster, one of them on each node",
    }.get(launch.launcher, f"by {launch.launcher.value}")
    hosts = {each.host_id: each for each in reversed(reports.values())}
    _say(f"distcollect doctor: {launch.world_size} process(es) {by}, rank 0 is the trainer", "")
    whys = {rank: _why(each, len(hosts), is_ray=is_ray) for rank, each in reports.items()}
    _say(report.ranks(reports.values(), whys), "")
    _say("workers that a host can serve, by each of its limits (without what envs and policy need)")
    _say(report.capacities(list(hosts.values())), "")

    findings = [*ranks.findings, *checks.check_versions(list(reports.values()))]
    for each in reports.values():
        findings += checks.check_host(each, launch.num_hosts, launch.num_workers)
    findings += _examine_links(reports, ranks)
    _say(report.topics(findings, _TOPICS), "")
    _say(*report.problems(findings) or ["nothing is wrong"])
    return bool(findings)


def _why(host_report: HostReport, num_hosts: int, *, is_ray: bool) -> str:
    """Why a rank uses its interface, in words."""
    if "TP_SOCKET_IFNAME" in host_report.variables:
        return "TP_SOCKET_IFNAME"
    if host_report.rank == 0 and LISTEN in os.environ:
        return LISTEN
    if host_report.rank == 0 and is_ray:
        return "this node's address in the Ray cluster"
    if num_hosts == 1:
        return "all ranks are on one host"
    return "the route to the other hosts" if host_report.rank == 0 else "the route to the trainer"


def _examine_links(reports: dict[int, HostReport], ranks: Ranks) -> list[Finding]:
    """Measure the links between all hosts, and print them; return the problems."""
    findings: list[Finding] = []
    measured: dict[int, Link] = {}  # of one rank of each host
    reached: list[int] = []
    for rank in list(reports)[1:]:
        with _noting(findings, f"trainer and {reports[rank].where}"):
            if reports[rank].host_id in {reports[other].host_id for other in measured}:
                ranks.reach(rank)
            else:
                link = measured[rank] = ranks.measure(rank)
                pair = reports[0], reports[rank]
                findings += checks.check_link(*pair, link.skew_s, mapped=link.shares_memory)
            reached.append(rank)
    if measured:
        _say("between the trainer and each worker (rollouts)")
        _say(report.links(reports, measured), "")
    if 1 < len(measured) <= _MAX_HOSTS:
        hops = {}
        for one, other in itertools.permutations(measured, 2):
            with _noting(findings, f"{reports[one].host} to {reports[other].host}"):
                hops[one, other] = ranks.hop(one, other)
        _say("between the hosts of workers (broadcasts)")  # which they pass on
        _say(report.hops(reports, hops), "")
    if len(reached) > 1:
        with _noting(findings, "broadcast to all workers"):
            speed = report.speed(ranks.broadcast(reached))
            _say(f"broadcast to all {len(reached)} workers: {speed}", "")
    with _noting(findings, ""):
        for rank, cores in ranks.idle(reached, _IDLE_S).items():
            findings += checks.check_idle(reports[rank].where, cores)
    return findings


@contextlib.contextmanager
def _noting(findings: list[Finding], where: str) -> Iterator[None]:
    """Note an error of this link as a problem."""
    try:
        yield
    except (DistCollectError, RuntimeError) as error:
        # The cause is torch's own error, if there is one.
        problem = (str(error.__cause__ or "") or str(error)).partition("\n")[0]
        findings.append(Finding("links", where, problem, _OPEN_PORTS))


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
