"""Launches that fail: the launch, the error's class, the value it names, and the remedy."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
from helpers.error_rows import ARGUMENT, PORT, Row, rpc, with_env

import distcollect as dc
from distcollect.launch.open_hosts import set_launched
from distcollect.launch.topology import Launch
from distcollect.launch.worker_hosts import HostEvents, WorkerHosts
from distcollect.net.client import join
from distcollect.net.messages import SupervisorHello, TrainerAddress
from distcollect.net.server import JoinServer, JoinServerEvents

cloudpickle.register_pickle_by_value(sys.modules[__name__])


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "no-such-host.invalid",
}


def detected(given: dict[str, str], **other: str | None) -> Launch:
    return Launch.detect({k: v for k, v in {**given, **other}.items() if v is not None})


def ran(given: dict[str, str], **other: str) -> Any:
    return with_env(lambda: dc.run(lambda: None), **{**given, **other})


def joined(port: int, token: str = "secret") -> Any:
    def find() -> TrainerAddress:
        return TrainerAddress("127.0.0.1", port, token)

    return join(find, SupervisorHello(rank=1), 0.3, name="rank 1")


def turned_away() -> None:
    server = JoinServer("127.0.0.1", "secret", JoinServerEvents())
    try:
        joined(server.port, "another")
    finally:
        server.close()


def answered_by_a_web_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(65536)  # else closing it would take the answer back
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            joined(server.getsockname()[1])
        finally:
            thread.join()


def with_three_ranks(use: Callable[[WorkerHosts], Any], *, launched: bool = False) -> None:
    hosts = WorkerHosts("127.0.0.1", "secret", num_ranks=3)
    set_launched(hosts if launched else None)
    try:
        use(hosts)
    finally:
        set_launched(None)
        hosts.join_server.close()


def wants_workers_that_another_collector_has(hosts: WorkerHosts) -> None:
    hosts.claim()
    rpc(num_workers=None)


LAUNCHES: list[Row] = [
    (lambda: detected(TORCHRUN, RANK=None), dc.LaunchError, "RANK is not set", "by torchrun"),
    (lambda: detected(TORCHRUN, MASTER_PORT=""), dc.LaunchError, "MASTER_PORT is not", "torchrun"),
    (lambda: detected(TORCHRUN, RANK="x"), dc.LaunchError, "RANK='x' is no whole", "by torchrun"),
    (lambda: detected(TORCHRUN, RANK="2"), dc.LaunchError, "rank 2 .* the 2", "by torchrun"),
    (lambda: detected(TORCHRUN, MASTER_PORT="70000"), dc.LaunchError, "=70000", "by torchrun"),
    (
        lambda: detected(SLURM, SLURM_STEP_NODELIST=None),
        dc.LaunchError,
        "SLURM_STEP_NODELIST is not set",
        "by srun, also within a batch script",
    ),
    (lambda: detected(SLURM, SLURM_JOB_ID="x"), dc.LaunchError, "JOB_ID='x'", "by srun"),
    (
        lambda: ran(TORCHRUN, MASTER_ADDR="no-such-host.invalid"),
        dc.LaunchError,
        "MASTER_ADDR='no-such-host.invalid'",
        "--local-addr=ADDRESS",
    ),
    (
        lambda: ran(TORCHRUN, RANK="0", MASTER_PORT=str(PORT)),
        dc.LaunchError,
        f"MASTER_PORT={PORT}: another process has",
        "another --master-port",
    ),
    (
        lambda: ran(TORCHRUN, RANK="0", WORLD_SIZE="1"),
        dc.LaunchError,
        "has 1 process",
        "--nproc-per-node=2.*plain python",
    ),
    (
        lambda: ran(SLURM, SLURM_STEP_NUM_NODES="2"),
        dc.LaunchError,
        "no route to 'no-such-host.invalid'",
        "set MASTER_ADDR",
    ),
    (
        lambda: ran(SLURM, SLURM_PROCID="0", MASTER_PORT=str(PORT)),
        dc.LaunchError,
        f"port {PORT}: Address already in use",
        "under srun MASTER_PORT",
    ),
    (
        lambda: with_three_ranks(lambda hosts: hosts.attach(HostEvents(), 2, 0.1)),
        dc.DeadlineError,
        r"ranks \[1, 2\] .*0.1 s",
        "'distcollect doctor'",
    ),
    (
        lambda: with_three_ranks(lambda hosts: hosts.num_workers(5)),
        ARGUMENT,
        "num_workers=5.* 3 worker rank",
        "launch more",
    ),
    (
        lambda: with_three_ranks(
            lambda _: rpc(listen="127.0.0.1:9999", num_workers=None), launched=True
        ),
        ARGUMENT,
        "listen='127.0.0.1:9999'",
        "set DISTCOLLECT_LISTEN",
    ),
    (
        lambda: with_three_ranks(wants_workers_that_another_collector_has, launched=True),
        dc.CollectorStateError,
        "another collector is open, and has the workers of this launch",
        r"its shutdown\(\) first, or take a MultiSyncDataCollector",
    ),
    (turned_away, dc.LaunchError, "doesn't have this run's token", "DISTCOLLECT_TOKEN_FILE"),
    (answered_by_a_web_server, dc.LaunchError, r"127.0.0.1:\d+ is no trainer", "check the address"),
    (
        lambda: joined(free_port()),
        dc.LaunchError,
        r"rank 1 .*0.3 s.*127.0.0.1:\d+, ended with: .*refused",
        "do firewalls",
    ),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
