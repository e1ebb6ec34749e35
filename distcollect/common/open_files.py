"""Limits of this process's open files, sockets too, and its standard streams."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator

# Some programs close every descriptor that they might have: no limit is raised above this.
_MOST = 1 << 20
# What a trainer needs at least (measured with torch 2.13): files without workers, for each worker
# a control connection, four sockets of torch's RPC, and its supervisor's connection. A worker that
# the trainer starts has no supervisor, but three pieces of memory, its step counter and two
# rollouts, and beside a display a pipe.
_FILES, _FILES_PER_WORKER, FILES_PER_LOCAL_WORKER = 140, 6, 9
_STDOUT, _STDERR = 1, 2


def limit() -> int:
    """Return how many files this process may have open at present."""
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _finite(limit: int) -> int:
    return _MOST if limit == resource.RLIM_INFINITY else limit


def highest_limit() -> int:
    """Return the limit that :func:`raise_limit` can set."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit(), min(_finite(hard), _MOST))


def raise_limit() -> None:
    """Raise this process's soft limit to the hard one, at most to 1,048,576."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < highest_limit():
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest_limit(), hard))


def shortage(num_workers: int, *, are_local: bool) -> str:
    """Say why a trainer can't have so many workers; "" if it can.

    ``are_local``: the trainer starts them itself.
    """
    each = FILES_PER_LOCAL_WORKER if are_local else _FILES_PER_WORKER
    needed, highest = _FILES + each * num_workers, highest_limit()
    if needed <= highest:
        return ""
    return (
        f"{num_workers} workers need at least {needed} open files, but this process may have "
        f"{highest}: raise its hard limit (ulimit -Hn {needed + 1000} as root, LimitNOFILE in "
        "systemd, nofile in /etc/security/limits.conf), or use fewer workers"
    )


def fill_standard_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

    Else a socket would be opened under its number, and get what is written to stderr.
    """
    fd = 0
    while fd <= _STDERR:
        fd = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    os.close(fd)


def flush_output() -> None:
    """Write out what was printed, if somebody still takes it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, a pipe to a program that has ended, None
            stream.flush()


@contextlib.contextmanager
def output_streams() -> Iterator[tuple[int, int]]:
    """Give a child process descriptors of stdout and stderr; the null device if they are closed."""
    fill_standard_streams()
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        # What was opened under that number by someone else is not for children.
        stdout, stderr = (fd if os.get_inheritable(fd) else nothing for fd in (_STDOUT, _STDERR))
        yield stdout, stderr
    finally:
        os.close(nothing)
