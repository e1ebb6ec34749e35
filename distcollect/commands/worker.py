"""``distcollect worker``: starts a worker on any host for a trainer that runs or will run."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from distcollect.commands.argtypes import above_0, count, declare, import_from_here
from distcollect.errors import ArgumentError, LaunchError
from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.rendezvous import host_and_port, read_token
from distcollect.launch.run_folder import (
    TOKEN_VARIABLE,
    RunFolder,
    RunOver,
    others_may_change,
    trusted_with,
)
from distcollect.launch.supervisor import supervise
from distcollect.net.messages import TrainerAddress

log = logging.getLogger(__name__)

_WAIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    where = parser.add_mutually_exclusive_group(required=True)
    add = partial(declare, where.add_argument)
    add(
        "--join HOST:PORT",
        "where the trainer listens (its argument listen=, or DISTCOLLECT_LISTEN)",
    )
    about = (
        "the run folder of 'distcollect submit', on a disk that this host shares; the trainer's "
        "address and token are read from there, and read again if it was requeued"
    )
    add("--run FOLDER", about, dest="run_folder", type=Path)
    add = partial(declare, parser.add_argument)
    about = "the file with the run's token (default: what DISTCOLLECT_TOKEN_FILE names, else the "
    add("--token-file FILE", f"{about}token in DISTCOLLECT_TOKEN)")
    about = (
        f"how long to wait for the trainer (default: {_WAIT_S:g}; with --run, the run's patience)"
    )
    add("--wait SECONDS", about, type=above_0)
    add("--threads N", "threads that torch uses in the worker", type=count, default=1)


def run(given: argparse.Namespace) -> int:
    """Supervise a worker process until the trainer is done; 1 if that failed, with --join.

    Raises:
        ArgumentError: the address or the token is missing or malformed.
        LaunchError: the trainer can't be reached, or refused.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("distcollect").setLevel(logging.INFO)
    import_from_here()
    if given.run_folder is not None:
        return _join_run(RunFolder(given.run_folder), given)
    trainer = TrainerAddress(*host_and_port("--join", given.join), _token(given))
    return 0 if _serve(lambda: trainer, given.threads, given.wait or _WAIT_S, None) else 1


def _token(given: argparse.Namespace, file: Path | None = None) -> str:
    """The token in the file that the user named, if any; else in ``file``."""
    if (path := given.token_file or file) is not None:
        os.environ[TOKEN_VARIABLE] = str(path)
    token = read_token("--token-file" if given.token_file else TOKEN_VARIABLE)
    if token is None:
        raise ArgumentError(
            "the trainer's token is missing: name the file that holds it by --token-file or "
            "DISTCOLLECT_TOKEN_FILE"
        )
    return token


def _serve(
    find: Callable[[], TrainerAddress], num_threads: int, timeout_s: float, patience_s: float | None
) -> bool:
    """Return whether the trainer ended without an error."""
    placement = CpuPlacement(None, num_threads)
    done = supervise(
        find, rank=None, placement=placement, timeout_s=timeout_s, patience_s=patience_s
    )
    needless = "needs this worker no more"
    log.info("the trainer %s", needless if done else f"failed, and {needless}; its log says why")
    return done


def _join_run(folder: RunFolder, given: argparse.Namespace) -> int:
    if problem := others_may_change(folder.path):
        raise ArgumentError(f"--run {problem}")
    if doubt := trusted_with(folder.path):
        log.warning("--run %s", doubt)
    if not folder.settings:
        raise ArgumentError(
            f"--run {folder.path}: this host sees no run of 'distcollect submit' there; "
            "name the folder that it printed, on a disk that this host shares"
        )
    token = _token(given, folder.token_file)
    wait_s = given.wait or folder.patience_s
    if (script_folder := folder.settings.get("script_folder")) is not None:
        # Python puts it first for the script too, whose modules stand beside it.
        sys.path.insert(0, script_folder)
    log.info("waiting up to %g s for the trainer of %s", wait_s, folder.path)
    try:
        _serve(lambda: TrainerAddress(*folder.address(), token), given.threads, wait_s, wait_s)
    except RunOver as error:
        log.info("the run is over: %s", error)
    except LaunchError as error:
        state = folder.read("trainer.json")
        if state is None:
            hint = (
                f"Its job may still be queued: 'distcollect status {folder.path}' shows that; "
                "--wait SECONDS gives it longer"
            )
        else:
            hint = (
                f"{folder.path}/trainer.json says: {state}. If the trainer that wrote this has "
                "ended, the address is stale: 'distcollect status' shows what became of its job, "
                "'distcollect cancel' ends the rest. If it runs, can this host reach that address, "
                f"and is {folder.token_file} the run's own?"
            )
        raise LaunchError(f"{error}\n{hint}") from error
    return 0
