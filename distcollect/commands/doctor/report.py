"""What the doctor has to say, as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport
from distcollect.commands.doctor.links import Hop, Link


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines; a column of numbers, but for its heading, is aligned to the right."""
    aligned = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        is_number = all(cell[:1].isdigit() or cell[:1] in ("+", "-") for cell in column[1:])
        align = str.rjust if is_number else str.ljust
        aligned.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]


def ranks(surveys: Iterable[HostReport], whys: Mapping[int, str]) -> list[str]:
    """Where all ranks are, and what has decided that."""
    heading = ("rank", "host", "address", "interface", "cores", "files", "chosen by")
    rows = [
        (
            str(survey.rank),
            survey.host,
            survey.address,
            survey.interface or "none",
            str(survey.num_cores),
            str(survey.max_files),
            whys[survey.rank],
        )
        for survey in surveys
    ]
    return columns([heading, *rows])


def links(surveys: Mapping[int, HostReport], measured: Mapping[int, Link]) -> list[str]:
    """The table of what goes on between the trainer and each worker."""
    rows = [("rank", "host", "round trip", "RPC fetch", "broadcast", "clock", "rollouts")]
    for rank, link in measured.items():
        rows.append(
            (
                str(rank),
                surveys[rank].host,
                f"{link.round_trip_s * 1e3:.2f} ms",
                speed(link.fetch_bytes_per_s),
                speed(link.broadcast_bytes_per_s),
                f"{link.skew_s:+.3f} s",
                "mapped" if link.is_near else "sent",
            )
        )
    return columns(rows)


def hops(surveys: Mapping[int, HostReport], measured: Mapping[tuple[int, int], Hop]) -> list[str]:
    """The table of what goes on between the hosts of workers."""
    rows = [("from", "to", "connect", "TCP")]
    for (one, other), hop in measured.items():
        hosts = (surveys[one].host, surveys[other].host)
        rows.append((*hosts, f"{hop.connect_s * 1e3:.2f} ms", speed(hop.bytes_per_s)))
    return columns(rows)


def speed(bytes_per_s: float) -> str:
    """In MB/s."""
    digits = 0 if bytes_per_s > 1e7 else 2
    return f"{bytes_per_s / 1e6:,.{digits}f} MB/s"


def topics(findings: Sequence[Finding], looked_at: Mapping[str, str]) -> list[str]:
    """A line for each topic: whether all is well."""
    rows = []
    for topic, about in looked_at.items():
        wrong = sum(finding.topic == topic for finding in findings)
        state = "ok" if not wrong else f"{wrong} PROBLEM{'S' if wrong > 1 else ''}"
        rows.append((topic, state, about))
    return columns(rows)


def problems(findings: Sequence[Finding]) -> list[str]:
    """All that is wrong, each with its remedy. The same at several ranks is said once."""
    lines = []
    by_problem = itertools.groupby(
        sorted(findings, key=lambda f: (f.topic, f.problem, f.remedy)),
        key=lambda f: (f.topic, f.problem, f.remedy),
    )
    for number, ((topic, problem, remedy), same) in enumerate(by_problem, start=1):
        where = ", ".join(finding.where for finding in same)
        lines += [f"{number}. {topic}, {where}: {problem}", f"   what to do: {remedy}"]
    return lines
