"""The command ``doctor``: brings the ranks together, has them looked at, and says what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from distcollect.commands.argtypes import above_0
from distcollect.commands.doctor import checks, report
from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport, look
from distcollect.commands.doctor.links import Hop, Link, Links, link_problem
from distcollect.commands.doctor.server import DoctorHello, DoctorServer, take_part
from distcollect.errors import DistCollectError, LaunchError
from distcollect.launch.rendezvous import (
    LISTEN,
    ListenSpec,
    finder,
    host_and_port,
    listen_spec,
    read_token,
)
from distcollect.launch.run_folder import TOKEN_VARIABLE
from distcollect.launch.supervisor import join
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.interfaces import LOOPBACK
from distcollect.net.messages import TrainerAddress
from distcollect.net.server import JoinServer
from distcollect.transport.peer_ids import identity
from distcollect.transport.rpc import RpcTransport

_IDLE_S = 1.0
_MAX_HOSTS = 6  # among which all pairs are measured
_TOPICS = {
    "versions": "the same on all ranks",
    "torch": "has the private parts that are needed",
    "ranks": "all have come",
    "interface": "there, and chosen by the route between trainer and workers",
    "names": "of the hosts stand for addresses on the network",
    "ports": "can be listened on",
    "links": "RPC and broadcasts get through",
    "files": "enough may be open",
    "memory": "can be shared within a host",
    "idle": "waiting costs nothing",
    "clocks": "agree",
}
_OPEN_PORTS = (
    "let the hosts reach each other on all TCP ports from 1024 on, both ways: torch's RPC and Gloo "
    "take ports that happen to be free (see /proc/sys/net/ipv4/ip_local_port_range)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Finds out what would keep a run from working, and says what to do about it. Start it as "
        "you start your script: torchrun ... -m distcollect doctor, or srun python -m distcollect "
        "doctor. Without a launcher it checks this machine alone. The exit status is 1 if "
        "something is wrong."
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=above_0,
        default=60.0,
        help="how long to wait for all ranks (default: %(default)g)",
    )
    # How it starts a second process on a single machine.
    parser.add_argument("--join", metavar="HOST:PORT", help=argparse.SUPPRESS)


def run(given: argparse.Namespace) -> int:
    """Look at all ranks; 0 if nothing is wrong, else 1."""
    try:
        return _run(given)
    except LaunchError as error:
        _say(f"distcollect doctor on {platform.node()}: {error}")
        return 1


def _run(given: argparse.Namespace) -> int:
    if given.join is not None:
        host, port = host_and_port("--join", given.join)
        trainer = TrainerAddress(host, port, read_token() or "")
        return _be_looked_at(lambda: trainer, 1, given.wait)
    launch = Launch.detect()
    if launch.launcher is Launcher.NONE:
        place = ListenSpec(LOOPBACK, 0, secrets.token_hex(16))
        alone = replace(launch, world_size=2)
        return _look_at(alone, place, given.wait, lambda port: _second_process(place, port))
    if launch.rank > 0:
        return _be_looked_at(finder(launch), launch.rank, given.wait)
    return _look_at(launch, listen_spec(launch), given.wait, lambda _: contextlib.nullcontext())


@contextlib.contextmanager
def _second_process(place: ListenSpec, port: int) -> Iterator[None]:
    without_file = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-m", "distcollect", "doctor", "--join", f"{place.address}:{port}"],
        env={**without_file, "DISTCOLLECT_TOKEN": place.token},
    )
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    finally:
        process.kill()
        process.wait()


def _be_looked_at(find: Callable[[], TrainerAddress], rank: int, timeout_s: float) -> int:
    connection, _ = join(
        find, lambda trainer: DoctorHello(token=trainer.token), timeout_s, name=f"rank {rank}"
    )
    return 0 if take_part(connection, rank) else 1


def _look_at(
    launch: Launch,
    place: ListenSpec,
    timeout_s: float,
    others: Callable[[int], contextlib.AbstractContextManager[None]],
) -> int:
    with contextlib.ExitStack() as undo:
        transport = RpcTransport(identity().trainer, address=place.address)
        undo.callback(transport.close)
        links = Links(transport, place.address)
        undo.callback(links.close)
        ward = DoctorServer(transport, launch.world_size)
        server = JoinServer(place.address, place.token, ward, place.port)
        undo.callback(server.close)
        place.announce(server.port)
        undo.enter_context(others(server.port))
        undo.callback(ward.dismiss)
        findings = _examine(launch, look(0, place.address), ward, links, timeout_s)
    return int(bool(findings))


def _examine(
    launch: Launch, trainer: HostReport, ward: DoctorServer, links: Links, timeout_s: float
) -> list[Finding]:
    """Look at all, print the report; what is wrong."""
    missing = ward.wait(timeout_s)
    surveys = {0: trainer, **dict(sorted(ward.surveys.items()))}
    by = {Launcher.NONE: "on this machine"}.get(launch.launcher, f"by {launch.launcher.value}")
    hosts = {survey.host_id: survey for survey in reversed(surveys.values())}
    _say(f"distcollect doctor: {launch.world_size} process(es) {by}, rank 0 is the trainer", "")
    whys = {rank: _why(survey, len(hosts)) for rank, survey in surveys.items()}
    _say(*report.ranks(surveys.values(), whys), "")

    findings = _of_absent(ward, missing, timeout_s)
    findings += checks.check_versions(list(surveys.values()))
    for survey in surveys.values():
        findings += checks.check_torch(survey)
        findings += checks.check_interface(survey)
        findings += checks.check_name(survey, launch.num_hosts)
        findings += checks.check_ports(survey)
        findings += checks.check_files(survey, launch.num_workers)
        findings += checks.check_memory(survey)

    measured, reached, wrong = _measure(ward, surveys, links)
    findings += wrong
    if measured:
        _say("between the trainer and each worker, where rollouts go")
        _say(*report.links(surveys, measured), "")
    if len(reached) > 1:
        findings += _among_workers(surveys, reached, links)
    try:
        for rank, cores in links.idle(reached, _IDLE_S).items():
            findings += checks.check_idle(surveys[rank].where, cores)
    except DistCollectError as error:
        findings.append(Finding("links", "", link_problem(error), _OPEN_PORTS))
    _say(*report.topics(findings, _TOPICS), "")
    if findings:
        _say(*report.problems(findings))
    else:
        _say("nothing is wrong")
    return findings


def _why(survey: HostReport, num_hosts: int) -> str:
    """What has decided a rank's interface."""
    if "TP_SOCKET_IFNAME" in survey.variables:
        return "TP_SOCKET_IFNAME"
    if survey.rank == 0 and LISTEN in os.environ:
        return LISTEN
    if num_hosts == 1:
        return "all ranks are on one host"
    return "the route to the other hosts" if survey.rank == 0 else "the route to the trainer"


def _of_absent(ward: DoctorServer, missing: list[int], timeout_s: float) -> list[Finding]:
    found = [
        Finding("versions", f"a rank on {host}", f"it was turned away: {reason}", remedy)
        for host, reason in ward.turned_away
        for remedy in ["all hosts need the same versions, and the same DISTCOLLECT_TOKEN_FILE"]
    ]
    if len(missing) > len(found):
        found.append(
            Finding(
                "ranks",
                ", ".join(map(str, missing)),
                f"not there within {timeout_s:g} s",
                "look at what they say themselves; was the same command started on their hosts, "
                "and do firewalls let them through to the trainer?",
            )
        )
    return found


def _measure(
    ward: DoctorServer, surveys: dict[int, HostReport], links: Links
) -> tuple[dict[int, Link], dict[int, int], list[Finding]]:
    """One rank of each host, and whether the others can be reached: those, and who answered."""
    measured: dict[int, Link] = {}
    reached: dict[int, int] = {}
    findings: list[Finding] = []
    hosts: set[str] = set()
    for rank, peer in sorted(ward.peers.items()):
        where = surveys[rank].where
        try:
            if surveys[rank].host_id in hosts:
                links.reach(peer)
                reached[rank] = peer
                continue
            link = measured[rank] = links.measure(rank, peer)
            reached[rank] = peer
            hosts.add(surveys[rank].host_id)
        except (DistCollectError, RuntimeError) as error:
            findings.append(
                Finding("links", f"trainer and {where}", link_problem(error), _OPEN_PORTS)
            )
            continue
        findings += checks.check_clock(where, link.skew_s)
        findings += checks.check_near(surveys[0], surveys[rank], is_near=link.is_near)
    return measured, reached, findings


def _among_workers(
    surveys: dict[int, HostReport], peers: dict[int, int], links: Links
) -> list[Finding]:
    """Broadcasts are passed on from worker to worker."""
    findings: list[Finding] = []
    hosts = {surveys[rank].host_id: surveys[rank] for rank in reversed(list(peers))}
    if 1 < len(hosts) <= _MAX_HOSTS:
        hops = links.hops(sorted(hosts.values(), key=lambda s: s.rank), peers)
        for (one, other), hop in hops.items():
            if not isinstance(hop, Hop):
                where = f"{surveys[one].host} to {surveys[other].host}"
                findings.append(Finding("links", where, hop, _OPEN_PORTS))
        _say("between workers' hosts, where broadcasts are passed on")
        _say(*report.hops(surveys, {k: h for k, h in hops.items() if isinstance(h, Hop)}), "")
    try:
        _say(f"broadcast to all {len(peers)} workers: {report.speed(links.broadcast(peers))}", "")
    except (DistCollectError, RuntimeError) as error:
        findings.append(
            Finding("links", "broadcast to all workers", link_problem(error), _OPEN_PORTS)
        )
    return findings


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
