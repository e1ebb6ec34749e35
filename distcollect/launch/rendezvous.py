"""How the ranks of a launch find their trainer: at an address that all of them reach."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

from distcollect.errors import LaunchError
from distcollect.launch.run_folder import TOKEN_VARIABLE, RunFolder
from distcollect.launch.topology import Launch, Launcher
from distcollect.launch.worker_hosts import listen_address, read_token
from distcollect.net.interfaces import LOOPBACK, own_address_of, route_to, way_to

log = logging.getLogger(__name__)

# Torch declares no types for its stores.
dist: Any = torch.distributed

MEET_TIMEOUT_S = 300.0
_GATE_KEY = "distcollect/gate"


@dataclass(frozen=True)
class TrainerAddress:
    """Where the trainer's gate is, and what to show there."""

    host: str
    port: int
    token: str = field(repr=False)  # it may be in an error's text


@dataclass(frozen=True)
class ListenSpec:
    """Where a launch's trainer is to listen.

    Attributes:
        address: of this host.
        port: 0: any.
        token: what all have to show.
        store: torchrun's, by which the others learn of it; None: they know without.
        is_own_token: whether they have the token from the user too.
    """

    address: str
    port: int
    token: str = field(repr=False)
    store: Any = None
    is_own_token: bool = False

    def announce(self, port: int) -> None:
        """Tell the other ranks."""
        if self.store is not None:
            # Whoever reaches torchrun's store can read it: a secret of the user's stays out.
            token = "" if self.is_own_token else self.token
            self.store.set(_GATE_KEY, json.dumps([self.address, port, token]))


def listen_spec(launch: Launch) -> ListenSpec:
    """Where this trainer is to listen, by the launch and the user's settings.

    Raises:
        LaunchError: no way leads from here to the other hosts; or see
            :func:`~distcollect.launch.worker_hosts.read_token`.
    """
    assert launch.master is not None
    address, given = LOOPBACK, read_token()
    if launch.launcher is Launcher.SLURM:
        name, port = launch.master
        if not _is_on_one_host(launch):
            address = own_address(name, launch.last_host)
            if given is None:
                log.warning(
                    "workers are known by the SLURM job's id, which every user of the cluster can "
                    "see; set %s to the name of a file that holds a secret of yours",
                    TOKEN_VARIABLE,
                )
        address, wanted_port = listen_address(default=address)
        port = (wanted_port or port) + launch.trainer
        return ListenSpec(address, port, given or launch.run_id)
    store = _torchrun_store(launch)
    if launch.num_hosts > 1:
        address = _address_among_hosts(launch, store)
    address, port = listen_address(default=address)
    port = port + launch.trainer if port else 0
    token = given or secrets.token_hex(16)
    return ListenSpec(address, port, token, store, is_own_token=given is not None)


def _is_on_one_host(launch: Launch) -> bool:
    """Whether nobody comes from elsewhere, as jobs of workers may that are added to a run."""
    return launch.num_hosts == 1 and RunFolder.here() is None


def own_address(name: str, other: str = "") -> str:
    """The address of this host, ``name``, on the way to the host ``other``.

    Raises:
        LaunchError: no way leads from here to the others.
    """
    if (address := own_address_of(name)) is not None:
        return address
    # What this host calls itself is no address on the network: 127.0.1.1, as Debian has it.
    if other and (address := way_to(other)) is not None:
        return address
    raise LaunchError(
        f"this host's name {name!r} stands for none of its addresses that others can reach; set "
        "MASTER_ADDR to this host's address on the cluster's network"
    )


def _address_among_hosts(launch: Launch, store: Any) -> str:
    """This host's address on the way to the launch's others, and so theirs to here."""
    assert launch.master is not None
    if (address := way_to(launch.master[0])) is not None:
        return address
    # Torchrun's meeting point is on this host, so only ranks elsewhere know which way they came.
    for rank in range(launch.world_size - 1, 0, -1):
        try:
            theirs = store.get(_address_key(rank)).decode()
        except dist.DistError as error:
            raise LaunchError(
                f"rank {rank} did not say where it is within {MEET_TIMEOUT_S:g} s: look at what "
                "it says itself. Does every rank call distcollect.run(main)?"
            ) from error
        if theirs:
            return route_to(theirs)
    return LOOPBACK  # all of this trainer's are on its own host


def _torchrun_store(launch: Launch) -> Any:
    assert launch.master is not None
    # The agent serves the store, except with static rendezvous, where rank 0 has to.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = launch.master
    try:
        socket.getaddrinfo(host, port)  # else torch tries for minutes
        store = dist.TCPStore(
            host,
            port,
            is_master=not served and launch.rank == launch.trainer == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_TIMEOUT_S),
        )
    except (OSError, dist.DistError) as error:
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"rank 0 can't open the ranks' store on MASTER_PORT={port}: another process has "
                "that port; give torchrun another --master-port"
            ) from error
        raise LaunchError(
            f"torchrun's store at MASTER_ADDR={host!r}, port {port}, can't be reached from here: "
            f"{str(error).rstrip('.')}; start torchrun with --local-addr=ADDRESS, on each host its "
            "own address on the cluster's network"
        ) from error
    return dist.PrefixStore(f"{launch.run_id}/{launch.trainer}", store)


def _address_key(rank: int) -> str:
    return f"distcollect/address/{rank}"


def finder(launch: Launch) -> Callable[[], TrainerAddress]:
    """What tells a rank where its trainer is; see :func:`supervise`.

    Raises:
        LaunchError: the ranks' meeting point can't be reached.
    """
    assert launch.master is not None
    given = read_token()
    if launch.launcher is Launcher.TORCHRUN:
        store = _torchrun_store(launch)
        if launch.num_hosts > 1:
            store.set(_address_key(launch.rank), way_to(launch.master[0]) or "")
        store.set_timeout(timedelta(seconds=1))
        last: list[Any] = []

        def find() -> TrainerAddress:
            try:
                last[:] = json.loads(store.get(_GATE_KEY))
            except dist.DistNetworkError as error:
                # The store's connection never comes back; a cable that was pulled may.
                if not last:
                    raise LaunchError(
                        f"torchrun's store is gone ({error}), and with it torchrun on the "
                        "trainer's host: look at what it says there, and start all ranks again"
                    ) from error
            host, port, token = last
            return TrainerAddress(host, port, token or given or "")

        return find
    host, port = launch.master
    if _is_on_one_host(launch):
        host = LOOPBACK
    elif way_to(host) is None:  # the trainer is on this host
        host = own_address(host, launch.last_host)
    host, wanted_port = listen_address(default=host)
    here = TrainerAddress(host, (wanted_port or port) + launch.trainer, given or launch.run_id)
    return lambda: here
