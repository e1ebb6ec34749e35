"""The doctor's tables and its list of problems, as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport
from distcollect.commands.doctor.ranks import Link
from distcollect.common.tables import text_table


def ranks(reports: Iterable[HostReport]) -> str:
    """Return a table of all ranks, with their addresses."""
    rows = [("rank", "host", "address", "interface", "cores", "files")]
    for r in reports:
        counts = str(r.num_cores), str(r.max_files)
        rows.append((str(r.rank), r.host, r.address, r.interface or "none", *counts))
    return text_table(rows, left=(1, 2, 3))


def capacities(reports: Sequence[HostReport]) -> str:
    """Return a table of how many workers each of these hosts can serve, by what limits them."""
    rows = [("host", *reports[0].capacity)]
    for report in reports:
        counts = report.capacity.values()
        rows.append((report.host, *("?" if n < 0 else f"{n:,}" for n in counts)))
    return text_table(rows, left=(0,))


def links(reports: Mapping[int, HostReport], measured: Mapping[int, Link]) -> str:
    """Return a table of the links between the trainer and each worker."""
    rows = [("rank", "host", "round trip", "RPC fetch", "broadcast", "rollouts")]
    for rank, link in measured.items():
        round_trip = f"{link.round_trip_s * 1e3:.2f} ms"
        rates = speed(link.fetch_bytes_per_s), speed(link.broadcast_bytes_per_s)
        way = "mapped" if link.shares_memory else "sent"
        rows.append((str(rank), reports[rank].host, round_trip, *rates, way))
    return text_table(rows, left=(1, 5))


def speed(bytes_per_s: float) -> str:
    """Return a rate in MB/s."""
    digits = 0 if bytes_per_s > 1e7 else 2
    return f"{bytes_per_s / 1e6:,.{digits}f} MB/s"


def topics(findings: Sequence[Finding], checked: Mapping[str, str]) -> str:
    """Return a table of all topics, with the number of problems."""
    rows = []
    for topic, about in checked.items():
        wrong = sum(finding.topic == topic for finding in findings)
        state = "ok" if not wrong else f"{wrong} PROBLEM{'S' if wrong > 1 else ''}"
        rows.append((topic, state, about))
    return text_table(rows, left=(0, 1, 2))


def problems(findings: Sequence[Finding]) -> list[str]:
    """Return all problems with their remedies; one that several ranks have is listed once."""
    lines = []
    same_problem = itemgetter(0, 2, 3)
    by_problem = itertools.groupby(sorted(findings, key=same_problem), key=same_problem)
    for number, ((topic, problem, remedy), same) in enumerate(by_problem, start=1):
        where = ", ".join(finding.where for finding in same)
        lines += [f"{number}. {topic}, {where}: {problem}", f"   what to do: {remedy}"]
    return lines
