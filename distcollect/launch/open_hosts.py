"""Which hosts a collector gets: those of this process's launch, or hosts of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass

from distcollect.errors import ArgumentError, LaunchError
from distcollect.launch.cpu_placement import num_cores
from distcollect.launch.rendezvous import LISTEN, listen_address, read_token
from distcollect.launch.run_folder import TOKEN_VARIABLE, RunFolder
from distcollect.launch.topology import one_of_several
from distcollect.launch.worker_hosts import PlacerSettings, WorkerHosts
from distcollect.net.interfaces import LOOPBACK
from distcollect.net.tls import SECURITY

EACH_RANK = "DISTCOLLECT_EACH_RANK_TRAINS"

_launched: WorkerHosts | None = None


def set_launched(hosts: WorkerHosts | None) -> None:
    """Have this process's collectors use ``hosts``; None: each starts its own local workers."""
    global _launched  # noqa: PLW0603 - a process has one place in its launch
    _launched = hosts


def current() -> WorkerHosts | None:
    """The launch's hosts; None without a launch."""
    return _launched


def _refuse_several() -> None:
    """Refuse to start workers in each rank of a launch, as each would train on its own.

    Raises:
        LaunchError: this process is one of several, and the user hasn't said that this is meant.
    """
    if os.environ.get(EACH_RANK) == "1":
        return
    if by := one_of_several():
        raise LaunchError(
            f"{by}, and each of these processes would train on its own with workers of its own. "
            "Put the script into a function, and call distcollect.run(main) in each of them, or "
            "start `-m distcollect run SCRIPT` instead of the script: then one trains and the "
            f"others are its workers. If each is meant to train on its own, set {EACH_RANK}=1"
        )


@dataclass(frozen=True)
class WantedHosts:
    """The hosts that a collector asks for; by default those of the launch.

    Attributes:
        listen: "HOST:PORT" where others may join; None: what DISTCOLLECT_LISTEN says.
        security: see :func:`~distcollect.net.tls.check_security`.
        local: use this host alone, even in a launch; nobody else can join.
        placer: a scheduler that starts the workers, even in a launch.
    """

    listen: str | None = None
    security: str | None = None
    local: bool = False
    placer: PlacerSettings | None = None


def open_hosts(
    num_workers: int | None, wanted: WantedHosts, patience_s: float = 0.0
) -> WorkerHosts:
    """The launch's hosts, or this host alone without a launch; for one collector until detached.

    Args:
        num_workers: local workers to start without a launch; None: one for each core. With a
            ``placer``: workers that it is to start.
        wanted: see above.
        patience_s: with a ``placer``: how long to wait for enough workers.

    Raises:
        CollectorStateError: another collector has the launch's hosts.
        ArgumentError: ``listen`` is malformed, there is no token for processes that join, or this
            process may not open enough files for so many workers.
        LaunchError: see :func:`~distcollect.net.interfaces.listen`; or this process is one of
            several of a launch, or the run's workers are in other jobs, and the script does not
            call :func:`~distcollect.run`.
    """
    launched = _launched
    if launched is not None and wanted.placer is None and not wanted.local:
        for name, variable in (("listen", LISTEN), ("security", SECURITY)):
            if (given := getattr(wanted, name)) is not None:
                raise ArgumentError(
                    f"{name}={given!r}: under a launcher, workers join where its trainer listens; "
                    f"set {variable} instead"
                )
        launched.claim()
        return launched
    with contextlib.ExitStack() as on_error:
        if wanted.placer is not None:
            scheduler = wanted.placer.connect()
            on_error.callback(scheduler.close)
            address, port = listen_address(wanted.listen, default=scheduler.address)
            hosts = WorkerHosts(
                address,
                read_token() or secrets.token_hex(16),
                num_expected=num_workers,
                patience_s=patience_s,
                placer=scheduler,
                port=port,
                security=wanted.security,
            )
        else:
            hosts = _own_hosts(num_workers, wanted)
        on_error.pop_all()
    if launched is not None:
        launched.local_hosts.add(hosts)
    return hosts


def _own_hosts(num_workers: int | None, wanted: WantedHosts) -> WorkerHosts:
    """This host, which starts the workers itself; others may join too."""
    if _launched is None:
        _refuse_several()
    folder = RunFolder.here()
    if folder is not None and folder.num_workers and not wanted.local:
        raise LaunchError(
            f"the workers of the run in {folder.path} are in separate jobs, and can only join a "
            "script that calls distcollect.run(main); or submit it without --worker-jobs"
        )
    address, port = (LOOPBACK, 0) if wanted.local else listen_address(wanted.listen)
    token = read_token()
    if port and token is None:
        raise ArgumentError(
            f"to let workers join at {address}:{port}, put a secret into a file that only you can "
            f"read and name it by {TOKEN_VARIABLE}, here and where they are started"
        )
    num_local = num_cores() if num_workers is None else num_workers
    return WorkerHosts(
        address,
        token or secrets.token_hex(16),
        num_local=num_local,
        port=port,
        security=wanted.security,
    )
