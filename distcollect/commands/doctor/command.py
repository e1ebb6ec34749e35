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

from distcollect.commands.argtypes import above_0
from distcollect.commands.doctor import checks, report
from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport, inspect_host
from distcollect.commands.doctor.links import Hop, Link, Links
from distcollect.commands.doctor.server import DoctorHello, DoctorServer, take_part
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
from distcollect.launch.supervisor import join
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.interfaces import LOOPBACK
from distcollect.net.messages import TrainerAddress
from distcollect.net.server import JoinServer
from distcollect.transport.start import start_transport

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
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=above_0,
        default=60.0,
        help="how long to wait for all ranks (default: %(default)g)",
    )
    # The command starts a second process by this when it checks a single machine.
    parser.add_argument("--join", metavar="HOST:PORT", help=argparse.SUPPRESS)


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
    if launch.launcher is Launcher.RAY_JOB or (
        launch.launcher is Launcher.NONE and RAY_ADDRESS in os.environ
    ):
        return _inspect_ray(launch, given.wait)
    if launch.launcher is Launcher.NONE:
        listen = ListenSpec(LOOPBACK, 0, secrets.token_hex(16))
        alone = replace(launch, world_size=2)
        return _inspect_all(alone, listen, given.wait, partial(_second_process, listen))
    if launch.rank > 0:
        return _serve_trainer(finder(launch), launch.rank, given.wait)
    return _inspect_all(
        launch, listen_spec(launch), given.wait, lambda *_: contextlib.nullcontext()
    )


def _inspect_ray(launch: Launch, timeout_s: float) -> int:
    """Inspect this process, and a rank on each node of the Ray cluster."""
    with contextlib.closing(RayNodes()) as nodes:
        _say(nodes.about)
        address, port = listen_address(default=nodes.address)
        listen = ListenSpec(address, port, read_token() or secrets.token_hex(16))
        # Ray knows its nodes by their addresses: what their names stand for doesn't matter.
        launch = replace(launch, launcher=Launcher.RAY_JOB, world_size=1 + len(nodes), num_hosts=1)

        def ranks(server: DoctorServer, port: int) -> contextlib.AbstractContextManager[None]:
            return nodes.ranks(server, port, listen.token, timeout_s)

        return _inspect_all(launch, listen, timeout_s, ranks)


@contextlib.contextmanager
def _second_process(listen: ListenSpec, _: DoctorServer, port: int) -> Iterator[None]:
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
    others: Callable[[DoctorServer, int], contextlib.AbstractContextManager[None]],
) -> int:
    with contextlib.ExitStack() as undo:
        transport = start_transport(listen.address)
        undo.callback(transport.close)
        links = Links(transport, listen.address)
        undo.callback(links.close)
        server = DoctorServer(transport, launch.world_size)
        join_server = JoinServer(listen.address, listen.token, server, listen.port)
        undo.callback(join_server.close)
        listen.announce(join_server.port)
        undo.enter_context(others(server, join_server.port))
        undo.callback(server.end)
        findings = _examine(launch, inspect_host(0, listen.address), server, links, timeout_s)
    return int(bool(findings))


def _examine(
    launch: Launch, trainer: HostReport, server: DoctorServer, links: Links, timeout_s: float
) -> list[Finding]:
    """Inspect all ranks and print what was found; return the problems."""
    missing = server.wait(timeout_s)
    reports = {0: trainer, **dict(sorted(server.reports.items()))}
    by = {
        Launcher.NONE: "on this machine",
        Launcher.RAY_JOB: "in the Ray cluster, one of them on each node",
    }.get(launch.launcher, f"by {launch.launcher.value}")
    hosts = {host_report.host_id: host_report for host_report in reversed(reports.values())}
    _say(f"distcollect doctor: {launch.world_size} process(es) {by}, rank 0 is the trainer", "")
    is_ray = launch.launcher is Launcher.RAY_JOB
    whys = {rank: _why(each, len(hosts), is_ray=is_ray) for rank, each in reports.items()}
    _say(report.ranks(reports.values(), whys), "")
    _say("workers that a host can serve, by each of its limits (without what envs and policy need)")
    _say(report.capacities(list(hosts.values())), "")

    findings = _about_missing(server, missing, timeout_s)
    findings += checks.check_versions(list(reports.values()))
    for each in reports.values():
        findings += checks.check_host(each, launch.num_hosts, launch.num_workers)
    findings += _examine_links(server, reports, links)
    _say(report.topics(findings, _TOPICS), "")
    _say(*report.problems(findings) or ["nothing is wrong"])
    return findings


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


def _about_missing(server: DoctorServer, missing: list[int], timeout_s: float) -> list[Finding]:
    versions = "all hosts need the same versions, and the same DISTCOLLECT_TOKEN_FILE"
    install = (
        "install distcollect there, with the versions of Python and torch that rank 0 has; or have "
        "Ray install it by a runtime_env"
    )
    found = [
        Finding("versions", f"a rank on {host}", f"it was refused: {reason}", versions)
        for host, reason in server.refusals
    ]
    found += [Finding("ranks", where, reason, install) for where, reason in server.failures]
    if len(missing) > len(found):
        found.append(
            Finding(
                "ranks",
                ", ".join(map(str, missing)),
                f"did not join within {timeout_s:g} s",
                "read their own output. Was the same command started on their hosts, and do "
                "firewalls let them reach the trainer?",
            )
        )
    return found


def _examine_links(
    server: DoctorServer, reports: dict[int, HostReport], links: Links
) -> list[Finding]:
    """Measure the links between all hosts, and print them; return the problems."""
    findings: list[Finding] = []
    measured: dict[int, Link] = {}  # of one rank of each host
    reached: dict[int, int] = {}  # all ranks that answered, with their ids in RPC
    for rank, peer in sorted(server.peers.items()):
        known = {reports[other].host_id for other in measured}
        with _noting(findings, f"trainer and {reports[rank].where}"):
            if reports[rank].host_id in known:
                links.reach(peer)
            else:
                link = measured[rank] = links.measure(rank, peer)
                findings += checks.check_link(reports[0], reports[rank], link)
            reached[rank] = peer
    if measured:
        _say("between the trainer and each worker (rollouts)")
        _say(report.links(reports, measured), "")
    hosts = {reports[rank].host_id: reports[rank] for rank in reversed(list(reached))}
    if 1 < len(hosts) <= _MAX_HOSTS:
        hops: dict[tuple[int, int], Hop] = {}
        for one, other in itertools.permutations(sorted(each.rank for each in hosts.values()), 2):
            with _noting(findings, f"{reports[one].host} to {reports[other].host}"):
                to = reports[other].address
                hops[one, other] = links.hop(reached[one], reached[other], to)
        _say("between the hosts of workers (broadcasts)")  # which they pass on
        _say(report.hops(reports, hops), "")
    if len(reached) > 1:
        with _noting(findings, "broadcast to all workers"):
            speed = report.speed(links.broadcast(reached))
            _say(f"broadcast to all {len(reached)} workers: {speed}", "")
    with _noting(findings, ""):
        for rank, cores in links.idle(reached, _IDLE_S).items():
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
