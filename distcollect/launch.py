"""``run(main)``: one line for every kind of launch."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed

from .cluster import LaunchedCluster, close_workers, set_launched
from .errors import LaunchError
from .link import Lifeline
from .processes import LocalProcesses
from .topology import LOOPBACK, Launch, Launcher, num_cores, route_to

log = logging.getLogger(__name__)

T = TypeVar("T")

# Torch declares no types for its stores.
dist: Any = torch.distributed

_MEET_TIMEOUT_S = 300.0
_TRY_TIMEOUT_S = 5.0
_RETRY_S = 0.2


def run(main: Callable[[], T]) -> T | None:
    """Call ``main`` on the trainer and serve on all other ranks of the launch.

    Under ``torchrun`` and ``srun``, rank 0 calls ``main`` and every other rank serves as a worker
    of the collectors that ``main`` makes, until it returns. Under no launcher ``main`` is called
    right here, and collectors start local workers of their own.

    Returns:
        What ``main`` returned; None on the other ranks.

    Raises:
        LaunchError: the ranks can't find each other.
    """
    launch = Launch.detect()
    if launch.launcher is Launcher.NONE:
        return main()
    if launch.num_workers < 1:
        raise LaunchError(
            "this launch has one process: one is the trainer, so at least two are needed "
            "(--nproc-per-node=2), or start the script with plain python"
        )
    if launch.rank > 0:
        _supervise(launch)
        return None
    cluster = _open_gate(launch)
    set_launched(cluster)
    try:
        return main()
    finally:
        # While their supervisors are still there to end them.
        close_workers()
        set_launched(None)
        cluster.close()


def num_workers(default: int) -> int:
    """Workers that this launch provides; ``default`` where there is no launcher.

    For sizes that depend on it, such as ``frames_per_batch``.
    """
    launch = Launch.detect()
    return default if launch.launcher is Launcher.NONE else launch.num_workers


def _open_gate(launch: Launch) -> LaunchedCluster:
    assert launch.master is not None
    if launch.launcher is Launcher.SLURM:
        host, port = launch.master
        address = LOOPBACK if launch.num_hosts == 1 else _own_address(host)
        return LaunchedCluster(address, launch.run_id, launch.num_workers, port)
    store = _torchrun_store(launch)
    address = LOOPBACK
    if launch.num_hosts > 1:
        # The way to a worker on another host: by it, workers will find the way here.
        address = route_to(store.get(_address_key(launch.world_size - 1)).decode())
    token = secrets.token_hex(16)
    cluster = LaunchedCluster(address, token, launch.num_workers)
    meeting = {"host": address, "port": cluster.gate.port, "token": token}
    store.set("distcollect/gate", json.dumps(meeting))
    return cluster


def _own_address(name: str) -> str:
    remedy = "set MASTER_ADDR to this host's address on the cluster's network"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise LaunchError(f"this host's name {name!r} has no address: {error}; {remedy}") from error
    if address.startswith("127."):
        raise LaunchError(
            f"this host's name {name!r} resolves to {address}, which others can't reach; {remedy}"
        )
    return address


def _torchrun_store(launch: Launch) -> Any:
    assert launch.master is not None
    # The agent serves the store, except with static rendezvous, where rank 0 has to.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        *launch.master,
        is_master=not served and launch.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=_MEET_TIMEOUT_S),
    )
    return dist.PrefixStore(launch.run_id, store)


def _address_key(rank: int) -> str:
    return f"distcollect/address/{rank}"


class _Terminated(BaseException):
    """SIGTERM or SIGINT reached a supervisor."""


def _supervise(launch: Launch) -> None:
    """Hold a rank for the trainer: start and watch worker processes on its word."""

    def terminate(number: int, _frame: object) -> NoReturn:
        raise _Terminated(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, terminate)
    lifeline: Lifeline | None = None
    processes: LocalProcesses | None = None
    try:
        lifeline, boot = _meet_trainer(launch)
        report = lifeline
        processes = LocalProcesses(
            lambda worker_id, code: report.send({"exited": worker_id, "code": code})
        )
        _obey(lifeline, processes, boot)
    except _Terminated as error:
        raise SystemExit(128 + error.args[0]) from None
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if processes is not None:
            processes.close(0)
        if lifeline is not None:
            lifeline.close()


def _obey(lifeline: Lifeline, processes: LocalProcesses, boot: dict[str, Any]) -> None:
    while (message := lifeline.receive()) is not None:
        if "spawn" in message:
            env = {str(key): str(value) for key, value in message["env"].items()}
            processes.spawn(message["spawn"], {**message["boot"], **boot}, env)
        elif "kill" in message:
            processes.kill(message["kill"])
        elif "bye" in message:
            return
    raise SystemExit("distcollect: the trainer is gone; this rank ends")


def _meet_trainer(launch: Launch) -> tuple[Lifeline, dict[str, Any]]:
    """Find the trainer's gate and join; what worker processes here have to know of it."""
    assert launch.master is not None
    deadline = time.monotonic() + _MEET_TIMEOUT_S
    store = None
    if launch.launcher is Launcher.TORCHRUN:
        store = _torchrun_store(launch)
        if launch.num_hosts > 1:
            store.set(_address_key(launch.rank), route_to(launch.master[0]))
        store.set_timeout(timedelta(seconds=1))
    problem: Exception | None = None
    while time.monotonic() < deadline:
        try:
            meeting = _meeting_point(launch, store)
            lifeline = Lifeline(meeting["host"], meeting["port"], _TRY_TIMEOUT_S)
            lifeline.join("supervisor", meeting["token"], rank=launch.rank)
        except (OSError, dist.DistStoreError) as error:
            # Not there yet; or, after a restart by torchrun, the address of the last attempt.
            problem = error
            time.sleep(_RETRY_S)
            continue
        threads = max(1, num_cores() // launch.local_world_size)
        return lifeline, {**meeting, "num_threads": threads}
    raise LaunchError(
        f"rank {launch.rank} could not reach the trainer (rank 0) by {launch.master[0]} within "
        f"{_MEET_TIMEOUT_S:g} s; the last try said: {problem}"
    )


def _meeting_point(launch: Launch, store: Any) -> dict[str, Any]:
    assert launch.master is not None
    if store is not None:
        meeting: dict[str, Any] = json.loads(store.get("distcollect/gate"))
        return meeting
    host, port = launch.master
    host = LOOPBACK if launch.num_hosts == 1 else host
    return {"host": host, "port": port, "token": launch.run_id}
