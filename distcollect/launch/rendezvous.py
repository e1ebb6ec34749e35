"""Where a trainer listens, and how the other ranks of its launch find it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from distcollect.common.waiting import Reminder
from distcollect.errors import ArgumentError, LaunchError
from distcollect.launch.run_folder import SECRET_VARIABLE, TOKEN_VARIABLE, RunFolder
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.interfaces import (
    LOOPBACK,
    address_towards,
    is_address,
    own_address_of,
    route_to,
)
from distcollect.net.messages import TrainerAddress

log = logging.getLogger(__name__)

_SHORT = 16  # characters: a token with fewer can be guessed


def _dist() -> Any:
    """Torch's, without the types of its stores, which it lacks; no process that joins loads it."""
    return importlib.import_module("torch.distributed")


RENDEZVOUS_TIMEOUT_S = 300.0
_LOOK_AGAIN_S = 5.0
_TRAINER_KEY, _ADDRESS_KEY = "distcollect/trainer", "distcollect/address"
_TOKEN_KEY = "distcollect/token"  # noqa: S105
LISTEN = "DISTCOLLECT_LISTEN"
_HOLDS_TOKEN = (
    "it has to hold the run's secret, the same for the trainer and for all processes that join"  # noqa: S105
)


@dataclass(frozen=True)
class ListenSpec:
    """Where a launch's trainer is to listen.

    Attributes:
        address: of this host.
        port: 0: any.
        token: what every process that joins has to know.
        store: torchrun's store, in which the other ranks look the address up; None: they can
            derive it themselves.
        is_users_token: whether the user set the token, on the other ranks too.
    """

    address: str
    port: int
    token: str = field(repr=False)
    store: Any = None
    is_users_token: bool = False

    def announce(self, port: int) -> None:
        """Let the other ranks know where the trainer listens."""
        if self.store is not None:
            # Every process that reaches torchrun's store can read it: the user's secret stays out.
            token = "" if self.is_users_token else self.token
            self.store.set(_TRAINER_KEY, json.dumps([self.address, port, token]))


def listen_spec(launch: Launch) -> ListenSpec:
    """Return where this trainer is to listen, according to the launch and the user's settings.

    Raises:
        LaunchError: no route leads from here to the other hosts; or see :func:`read_token`.
    """
    given = read_token()
    if launch.launcher is not Launcher.TORCHRUN:
        if given is None:
            # On one host too: every user of that host reaches its loopback interface.
            log.warning(
                "the token of this run is made from the SLURM job's id, which every user of the "
                "cluster can see; set %s to the name of a file that holds a secret",
                TOKEN_VARIABLE,
            )
        return ListenSpec(*_derived_address(launch), given or launch.run_id)
    store = _torchrun_store(launch)
    here = LOOPBACK if launch.num_hosts == 1 else _address_among_hosts(launch, store)
    address, port = listen_address(default=here)
    token = given or _token_in(store, launch.run_id)
    return ListenSpec(
        address, port and port + launch.trainer, token, store, is_users_token=given is not None
    )


def _token_in(store: Any, run_id: str) -> str:
    """Make a token for all trainers of the launch: they take rollouts over from each other."""
    shared = _dist().PrefixStore(run_id, store.underlying_store)
    token: bytes = shared.compare_set(_TOKEN_KEY, "", secrets.token_hex(16))
    return token.decode()


def _derived_address(launch: Launch) -> tuple[str, int]:
    """Where a trainer listens that all its ranks can derive from their launcher's variables."""
    assert launch.master is not None
    host, port = launch.master
    # All ranks are on this host; but further jobs of a run may be elsewhere.
    if launch.num_hosts == 1 and RunFolder.here() is None:
        host = LOOPBACK
    elif launch.rank == 0 or address_towards(host) is None:  # the trainer is on this host
        host = own_address(host, launch.last_host)
    address, wanted_port = listen_address(default=host)
    return address, (wanted_port or port) + launch.trainer


def own_address(name: str, other: str = "") -> str:
    """The address of this host, which is called ``name``, on the route to the host ``other``.

    Raises:
        LaunchError: no route leads from here to the other hosts.
    """
    if (address := own_address_of(name)) is not None:
        return address
    # This host's name stands for no address on the network, but for 127.0.1.1 as on Debian.
    if other and (address := address_towards(other)) is not None:
        return address
    raise LaunchError(
        f"this host's name {name!r} stands for none of its addresses that other hosts can reach; "
        "set MASTER_ADDR to this host's address on the cluster's network"
    )


def _address_among_hosts(launch: Launch, store: Any) -> str:
    """This host's address on the route to the launch's other hosts."""
    assert launch.master is not None
    if (address := address_towards(launch.master[0])) is not None:
        return address
    # Torchrun's store is on this host, so only ranks on other hosts know the route between us. One
    # of them is enough: another may have died.
    keys = {rank: f"{_ADDRESS_KEY}/{rank}" for rank in range(1, launch.world_size)}
    began = time.monotonic()
    reminder = Reminder(began)
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        if theirs := _announced(store, keys.keys() - missing):
            return route_to(theirs)
        now = time.monotonic()
        if now - began > RENDEZVOUS_TIMEOUT_S:
            raise LaunchError(
                f"ranks {missing} did not announce their address within {RENDEZVOUS_TIMEOUT_S:g} "
                "s: look at their own output. Does every rank call distcollect.run(main)?"
            )
        if reminder.is_due(now):
            log.warning("waiting for the address of one of the ranks %s", missing)
        with contextlib.suppress(_dist().DistError):
            store.wait([keys[missing[0]]], timedelta(seconds=_LOOK_AGAIN_S))
    theirs = _announced(store, keys)
    return route_to(theirs) if theirs else LOOPBACK  # all workers are on the trainer's own host


def _announced(store: Any, ranks: Iterable[int]) -> str:
    """The address of one of these ranks; "": they are all on the trainer's host."""
    addresses = (store.get(f"{_ADDRESS_KEY}/{rank}").decode() for rank in ranks)
    return next(filter(None, addresses), "")


def _torchrun_store(launch: Launch) -> Any:
    assert launch.master is not None
    # Torchrun's agent serves the store, except with static rendezvous, where rank 0 has to.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = launch.master
    try:
        socket.getaddrinfo(host, port)  # fails at once; torch would try for minutes
        store = _dist().TCPStore(
            host,
            port,
            is_master=not served and launch.rank == launch.trainer == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
    except (OSError, _dist().DistError) as error:
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
    return _dist().PrefixStore(f"{launch.run_id}/{launch.trainer}", store)


def finder(launch: Launch) -> Callable[[], TrainerAddress]:
    """A function that returns where a rank's trainer is; see :func:`.supervisor.supervise`.

    Raises:
        LaunchError: torchrun's store can't be reached.
    """
    assert launch.master is not None
    given = read_token()
    if launch.launcher is Launcher.TORCHRUN:
        store = _torchrun_store(launch)
        if launch.num_hosts > 1:
            store.set(f"{_ADDRESS_KEY}/{launch.rank}", address_towards(launch.master[0]) or "")
        store.set_timeout(timedelta(seconds=1))
        latest: list[Any] = []

        def find() -> TrainerAddress:
            try:
                latest[:] = json.loads(store.get(_TRAINER_KEY))
            except _dist().DistNetworkError as error:
                # The store never reconnects, but the trainer may still be at its last address:
                # the network may have been cut for a while.
                if not latest:
                    raise LaunchError(
                        f"torchrun's store is gone ({error}), and with it torchrun on the "
                        "trainer's host: look at its output there, and start all ranks again"
                    ) from error
            except _dist().DistStoreError as error:
                raise TimeoutError(f"it is not in torchrun's store yet: {error}") from error
            host, port, token = latest
            return TrainerAddress(host, port, token or given or "")

        return find
    here = TrainerAddress(*_derived_address(launch), given or launch.run_id)
    return lambda: here


def listen_address(listen: str | None = None, default: str = LOOPBACK) -> tuple[str, int]:
    """Find where to listen: the argument, DISTCOLLECT_LISTEN, or ``default`` and any port (0).

    Raises:
        ArgumentError: it isn't "ADDRESS:PORT".
    """
    wanted = listen or os.environ.get(LISTEN)
    if not wanted:
        return default, 0
    name = "listen" if listen else LISTEN
    host, port = host_and_port(name, wanted)
    if not is_address(host):
        # A host's own name often stands for an address that other hosts can't reach.
        raise ArgumentError(
            f"{name}={wanted!r}: {host!r} is no address; give this host's address on the network "
            "that it shares with the workers, as in 10.0.0.5:29600"
        )
    return host, port


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """The parts of "HOST:PORT" or "[HOST]:PORT".

    Raises:
        ArgumentError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    # isdigit() takes '²' for one, too, and int() doesn't.
    is_number = port.isascii() and port.isdecimal()
    if not (colon and host and is_number and 0 < int(port) < 2**16):
        raise ArgumentError(f"{name}={text!r}: must be HOST:PORT, as in 10.0.0.5:29600")
    return host.strip("[]"), int(port)


def read_token(option: str = TOKEN_VARIABLE) -> str | None:
    """The user's secret, which processes that join have to know; None: the user set none.

    ``option``: by what the user named its file, as errors name it.

    Raises:
        LaunchError: the file can't be read, is empty, or other users may read it.
    """
    path = os.environ.get(TOKEN_VARIABLE)
    if path is None:
        return _weighed(SECRET_VARIABLE, os.environ.get(SECRET_VARIABLE) or None)
    name = f"{option}={path}"
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise LaunchError(f"{name}: the token can't be read ({why}); {_HOLDS_TOKEN}") from error
    if not token:
        raise LaunchError(f"{name}: the file is empty; {_HOLDS_TOKEN}")
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise LaunchError(
            f"{name}: others may read or change it ({stat.filemode(mode)}), so it is no secret; "
            f"make a new one, chmod 600 {shlex.quote(path)}"
        )
    if mode & stat.S_IRGRP:
        log.warning("%s: its group may read it; is that meant?", name)
    return _weighed(name, token)


@cache
def _weighed(name: str, token: str | None) -> str | None:
    """Return ``token``; warn once if it is short."""
    if token is not None and len(token) < _SHORT:
        log.warning("%s: a token of %d characters can be guessed: use a longer one, as "
            "'openssl rand -hex 32' prints", name, len(token))  # fmt: skip
    return token
