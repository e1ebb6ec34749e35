"""How many files, sockets too, this process may have open at once."""

from __future__ import annotations

import contextlib
import resource

# Some programs close every descriptor that they might have: no limit is raised above this.
_MOST = 1 << 20
# What a trainer needs at least: 142 files with no worker, and for each worker a control connection,
# four sockets of torch's RPC and, on the same host, its memory (measured with torch 2.13).
_FILES, _FILES_PER_WORKER = 140, 6


def highest_limit() -> int:
    """The limit that :func:`raise_limit` can set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited:
        return _MOST
    return max(soft, _MOST if hard == unlimited else min(hard, _MOST))


def raise_limit() -> None:
    """Raise this process's soft limit to the hard one, at most to 1,048,576."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = highest_limit()
    if soft != resource.RLIM_INFINITY and soft < highest:
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))


def shortage(num_workers: int) -> str:
    """Why a trainer can't have so many workers, in words; "" if it can."""
    needed, limit = _FILES + _FILES_PER_WORKER * num_workers, highest_limit()
    if needed <= limit:
        return ""
    return (
        f"{num_workers} workers need at least {needed} open files, but this process may have "
        f"{limit}: raise its hard limit (ulimit -Hn {needed + 1000} as root, LimitNOFILE in "
        "systemd, nofile in /etc/security/limits.conf), or use fewer workers"
    )
