"""``distcollect worker``: starts a worker on any host for a trainer that runs or will run."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from distcollect.commands.argtypes import above_0, count
from distcollect.errors import ArgumentError, LaunchError
from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.rendezvous import host_and_port, read_token
from distcollect.launch.run_folder import TOKEN_VARIABLE, RunFolder, RunOver
from distcollect.launch.supervisor import supervise
from distcollect.net.messages import TrainerAddress

log = logging.getLogger(__name__)

_WAIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="where the trainer listens (its argument listen=, or DISTCOLLECT_LISTEN)",
    )
    where.add_argument(
        "--run",
        dest="run_folder",
        metavar="FOLDER",
        type=Path,
        help="the run folder of 'distcollect submit', on a disk that this host shares; the "
        "trainer's address and token are read from there, and read again if it was requeued",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the file with the run's token (default: what DISTCOLLECT_TOKEN_FILE names, else the "
        "token in DISTCOLLECT_TOKEN)",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=above_0,
        help=f"how long to wait for the trainer (default: {_WAIT_S:g}; with --run, the run's "
        "patience)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=count,
        default=1,
        help="threads that torch uses in the worker (default: %(default)d)",
    )


def run(given: argparse.Namespace) -> int:
    """Supervise a worker process until the trainer is done.

    Raises:
        ArgumentError: the address or the token is missing or malformed.
        LaunchError: the trainer can't be reached, or refused.
    """
    if given.run_folder is not None:
        return _join_run(RunFolder(given.run_folder), given)
    host, port = host_and_port("--join", given.join)
    trainer = TrainerAddress(host, port, _token(given.token_file))
    _serve(lambda: trainer, given.threads, _WAIT_S if given.wait is None else given.wait, None)
    return 0


def _token(file: str | os.PathLike[str] | None) -> str:
    if file is not None:
        os.environ[TOKEN_VARIABLE] = str(file)
    token = read_token()
    if token is None:
        raise ArgumentError(
            "the trainer's token is missing: name the file that holds it by --token-file or "
            "DISTCOLLECT_TOKEN_FILE"
        )
    return token


def _serve(
    find: Callable[[], TrainerAddress], num_threads: int, timeout_s: float, patience_s: float | None
) -> None:
    placement = CpuPlacement(None, num_threads)
    supervise(find, rank=None, placement=placement, timeout_s=timeout_s, patience_s=patience_s)


def _join_run(folder: RunFolder, given: argparse.Namespace) -> int:
    if not folder.settings:
        raise ArgumentError(
            f"--run {folder.path}: this host sees no run of 'distcollect submit' there; "
            "name the folder that it printed, on a disk that this host shares"
        )
    token = _token(given.token_file or folder.token_file)
    wait_s = folder.patience_s if given.wait is None else given.wait

    def find() -> TrainerAddress:
        host, port = folder.address()
        return TrainerAddress(host, port, token)

    if (script_folder := folder.settings.get("script_folder")) is not None:
        # Python puts it first for the script too, whose modules stand beside it.
        sys.path.insert(0, script_folder)
    log.warning("waiting up to %g s for the trainer of %s", wait_s, folder.path)
    try:
        _serve(find, given.threads, wait_s, wait_s)
    except RunOver as error:
        log.warning("the run is over: %s", error)
    except LaunchError as error:
        state = folder.read("trainer.json")
        if state is None:
            raise LaunchError(
                f"{error}\nIts job may still be queued: 'distcollect status {folder.path}' shows "
                "that; --wait SECONDS gives it longer"
            ) from error
        raise LaunchError(
            f"{error}\n{folder.path}/trainer.json says: {state}. If the trainer that wrote this "
            "has ended, the address is stale: 'distcollect status' shows what became of its job, "
            "'distcollect cancel' ends the rest. If it runs, can this host reach that address, and "
            f"is {folder.token_file} the run's own?"
        ) from error
    return 0
