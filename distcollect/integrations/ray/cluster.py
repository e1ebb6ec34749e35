"""This process's connection to a Ray cluster. Ray is imported when it is first used."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distcollect.errors import LaunchError

log = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
_REACH_TIMEOUT_S = 10.0

_lock = threading.RLock()
_num_users = 0
_ours = ""  # the connection that was made here
_our_arguments: Mapping[str, Any] = {}  # of it


def load_ray() -> Any:
    """The module ``ray``.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise LaunchError(
            "Ray is not installed here: pip install 'distcollect[ray]', here and on all nodes of "
            "the Ray cluster"
        ) from error


def connect(config: Mapping[str, Any]) -> Any:
    """Connect this process to a Ray cluster, unless it is connected; to be released once.

    Args:
        config: the arguments of ``ray.init``. Without an address, Ray takes the cluster that
            RAY_ADDRESS names, else one that runs on this host, else it starts one here. A warning
            says so if the process is connected with others.

    Returns:
        The module ``ray``.

    Raises:
        LaunchError: Ray is not installed, or it can't connect.
    """
    global _num_users, _ours, _our_arguments  # noqa: PLW0603 - a process has one connection to Ray
    ray = load_ray()
    arguments = {name: value for name, value in config.items() if value is not None}
    if not arguments.get("local_mode"):
        arguments.pop("local_mode", None)
    with _lock, _handler_of_sigterm():
        if not ray.is_initialized():
            _init(ray, arguments)
            _ours, _our_arguments = connection(ray), arguments
        elif ray.util.client.ray.is_connected():
            raise _client_error("a connection that was made before")
        elif arguments and (connection(ray) != _ours or arguments != _our_arguments):
            log.warning(
                "ray_init_config has no effect, as this process is connected to Ray already (at "
                "%s): ray.init(%s) is not called; leave it out, or call ray.shutdown() before",
                *(ray.get_runtime_context().gcs_address, _shown(arguments)),
            )
        _num_users += 1
    return ray


def connection(ray: Any) -> str:
    """Names this process's present connection to Ray, unlike any before; "" if there is none."""
    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else ""


def release() -> None:
    """The counterpart of :func:`connect`; the last one ends the connection that was made here."""
    global _num_users  # noqa: PLW0603 - a process has one connection to Ray
    ray = load_ray()
    with _lock:
        _num_users -= 1
        if _num_users == 0 and connection(ray) == _ours != "":
            ray.shutdown()


def _init(ray: Any, arguments: Mapping[str, Any]) -> None:
    address = str(arguments.get("address") or os.environ.get(ADDRESS) or "")
    if address.startswith("ray://"):
        raise _client_error(address)
    _check_reachable(address)
    try:
        ray.init(**arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        where = f" at {address}" if address else ""
        raise LaunchError(
            f"ray.init({_shown(arguments)}) could not connect to a Ray cluster{where}: {error}"
        ) from error


def _client_error(what: str) -> LaunchError:
    return LaunchError(
        f"{what} is of Ray Client, whose process is outside of the cluster, where the workers "
        "can't reach it: run the script on a host of the cluster, with `ray job submit`, or with "
        "python and the address HOST:6379"
    )


def _check_reachable(address: str) -> None:
    """Fail soon if nobody listens at an address; Ray itself tries for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or "/" in host:
        return  # "auto", "local", or something that Ray has to judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()
    except OSError as error:
        raise LaunchError(
            f"no Ray cluster can be reached at {address} ({error}): start one there by `ray start "
            f"--head`, or give another address, by ray_init_config={{'address': ...}} or {ADDRESS}"
        ) from error


@contextmanager
def _handler_of_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM that this process has set, else the one that Ray sets.

    ``ray.init`` sets one in Python, which exits. Then Ray's C++ side sets one that aborts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        handler = before if callable(before) else signal.getsignal(signal.SIGTERM)
        if callable(handler):
            signal.signal(signal.SIGTERM, handler)


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def words(resources: Mapping[str, float]) -> str:
    """Resources, as Ray counts them, in words: "1 CPU, 0.5 GPU, 2.1 GB of memory"."""
    parts = []
    for name, amount in resources.items():
        if name in ("memory", "object_store_memory"):
            parts.append(f"{amount / 1e9:.1f} GB of {name.replace('_', ' ')}")
        else:
            parts.append(f"{amount:g} {name}")
    return ", ".join(parts) or "nothing"


def nodes(ray: Any) -> list[dict[str, Any]]:
    """Return what Ray knows of each node that is up."""
    return [node for node in ray.nodes() if node["Alive"]]
