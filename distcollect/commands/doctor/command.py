"""The command ``doctor``: inspects all ranks of a launch and says what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from distcollect.commands.argtypes import above_0, declare
from distcollect.commands.doctor import checks
from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport
from distcollect.commands.doctor.ranks import Link, Ranks, take_part, take_part_at
from distcollect.common.tables import text_table
from distcollect.errors import DistCollectError
from distcollect.integrations.ray.cluster import ADDRESS as RAY_ADDRESS
from distcollect.integrations.ray.doctor_nodes import RayNodes
from distcollect.launch.rendezvous import (
    ListenSpec,
    finder,
    listen_address,
    listen_spec,
    read_token,
)
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.interfaces import LOOPBACK
from distcollect.transport.start import RPC, chosen

_MAX_HOSTS = 6  # with more, pairs of hosts are not tried
_OPEN_PORTS = (
    "let the hosts reach each other on all TCP ports from 1024 on, both ways: torch's RPC and Gloo "
    "use any free ports (/proc/sys/net/ipv4/ip_local_port_range); or set DISTCOLLECT_TRANSPORT=tcp"
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


def run(given: argparse.Namespace) -> int:
    """Inspect all ranks; 0 if there is no problem, otherwise 1.

    Raises:
        LaunchError: the ranks can't meet, or this one can't take part.
    """
    wait_s = given.wait
    launch = Launch.detect()
    if launch.rank > 0:
        take_part(finder(launch), launch.rank, wait_s)
        return 0
    is_alone = launch.launcher is Launcher.NONE
    if launch.launcher is Launcher.RAY_JOB or (is_alone and RAY_ADDRESS in os.environ):
        return _inspect_ray(launch, wait_s)
    if is_alone:
        listen = ListenSpec(LOOPBACK, 0, secrets.token_hex(16))
        return _inspect_all(replace(launch, world_size=2), listen, wait_s, _start_second_process)
    # The launcher starts the others.
    return _inspect_all(launch, listen_spec(launch), wait_s, lambda *_: None)


def _inspect_ray(launch: Launch, wait_s: float) -> int:
    """Inspect this process, and a rank on each node of the Ray cluster."""
    with contextlib.closing(RayNodes()) as nodes:
        _say(nodes.about)
        address, port = listen_address(default=nodes.address)
        listen = ListenSpec(address, port, read_token() or secrets.token_hex(16))
        # Ray knows its nodes by their addresses: what their names stand for doesn't matter.
        ray, size = Launcher.RAY_JOB, 1 + len(nodes)
        launch = replace(launch, launcher=ray, world_size=size, num_hosts=1)
        return _inspect_all(launch, listen, wait_s, nodes.start_ranks)


def _start_second_process(ranks: Ranks, wait_s: float) -> None:
    target, context = take_part_at, multiprocessing.get_context("spawn")
    context.Process(target=target, args=(ranks.trainer, 1, wait_s), daemon=True).start()


def _inspect_all(
    launch: Launch,
    listen: ListenSpec,
    wait_s: float,
    start_others: Callable[[Ranks, float], None],
) -> int:
    """Inspect this rank and all others."""
    with contextlib.closing(Ranks(listen, launch.world_size)) as ranks:
        start_others(ranks, wait_s)
        ranks.wait(wait_s)
        return int(_examine(launch, ranks))


def _examine(launch: Launch, ranks: Ranks) -> bool:
    """Print what was found about all ranks; return True if something is wrong."""
    reports = dict(sorted(ranks.reports.items()))
    hosts = {each.host_id: each for each in reversed(reports.values())}
    _say(f"distcollect doctor: {launch.world_size} process(es), rank 0 is the trainer", "")
    _say(_ranks_table(reports.values()), "")
    _say("workers that a host can serve, by each of its limits (without what envs and policy need)")
    _say(capacity_table(list(hosts.values())), "")
    exposed = ranks.exposure(others_join=launch.launcher is not Launcher.NONE)
    _say("what listens in such a run", *exposed, "")

    findings = [*ranks.findings, *checks.check_versions(list(reports.values()))]
    for each in reports.values():
        findings += checks.check_host(each, launch.num_hosts, launch.num_workers)
    findings += _examine_links(ranks, reports)
    _say(*_problem_list(findings) or ["nothing is wrong"])
    if chosen(None) == RPC:
        _say(
            "(a line of torch's with tensorpipe_agent.cpp only means that a process here has ended)"
        )
    return bool(findings)


def _examine_links(ranks: Ranks, reports: Mapping[int, HostReport]) -> list[Finding]:
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
                mapped = link.shares_memory
                findings += checks.check_sharing(reports[0], reports[rank], mapped=mapped)
            reached.append(rank)
    if measured:
        _say("between the trainer and each worker")
        _say(_links_table(reports, measured), "")
    if ranks.broadcasts and len(measured) <= _MAX_HOSTS:
        # A broadcast is passed on from worker to worker.
        for one, other in itertools.permutations(measured, 2):
            with _noting(findings, f"{reports[one].host} to {reports[other].host}"):
                ranks.connect(one, other)
    if len(reached) > 1:
        with _noting(findings, "weights to all workers"):
            speed = _rate(ranks.send_weights(reached))
            _say(f"weights to all {len(reached)} workers: {speed}", "")
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


def _ranks_table(reports: Iterable[HostReport]) -> str:
    """Return a table of all ranks, with their addresses."""
    rows = [("rank", "host", "address", "interface", "cores", "files")]
    for r in reports:
        counts = str(r.num_cores), str(r.max_files)
        rows.append((str(r.rank), r.host, r.address, r.interface or "none", *counts))
    return text_table(rows, left=(1, 2, 3))


def capacity_table(reports: Sequence[HostReport]) -> str:
    """Return a table of how many workers each of these hosts can serve, by what limits them."""
    rows = [("host", *reports[0].capacity)]
    for report in reports:
        counts = report.capacity.values()
        rows.append((report.host, *("?" if n < 0 else f"{n:,}" for n in counts)))
    return text_table(rows, left=(0,))


def _links_table(reports: Mapping[int, HostReport], measured: Mapping[int, Link]) -> str:
    """Return a table of the links between the trainer and each worker."""
    rows = [("rank", "host", "round trip", "fetch", "weights", "rollouts")]
    for rank, link in measured.items():
        round_trip = f"{link.round_trip_s * 1e3:.2f} ms"
        rates = _rate(link.fetch_bytes_per_s), _rate(link.weights_bytes_per_s)
        way = "mapped" if link.shares_memory else "sent"
        rows.append((str(rank), reports[rank].host, round_trip, *rates, way))
    return text_table(rows, left=(1, 5))


def _rate(bytes_per_s: float) -> str:
    """Return a rate in MB/s."""
    digits = 0 if bytes_per_s > 1e7 else 2
    return f"{bytes_per_s / 1e6:,.{digits}f} MB/s"


def _problem_list(findings: Sequence[Finding]) -> list[str]:
    """Return all problems with their remedies; one that several ranks have is listed once."""
    lines = []
    same_problem = itemgetter(0, 2, 3)
    by_problem = itertools.groupby(sorted(findings, key=same_problem), key=same_problem)
    for number, ((topic, problem, remedy), same) in enumerate(by_problem, start=1):
        where = ", ".join(finding.where for finding in same)
        lines += [f"{number}. {topic}, {where}: {problem}", f"   what to do: {remedy}"]
    return lines


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
