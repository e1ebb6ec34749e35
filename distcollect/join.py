"""``distcollect worker --join``: a worker for a trainer that is running, from any host."""

from __future__ import annotations

import argparse
import os

from .cluster import host_and_port, read_token
from .errors import ArgumentError
from .launch import supervise
from .meeting import Meeting
from .placement import Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after ``distcollect worker``."""
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        required=True,
        help="where the trainer listens: its listen= argument, or its DISTCOLLECT_LISTEN",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the trainer's token; else DISTCOLLECT_TOKEN_FILE or DISTCOLLECT_TOKEN",
    )
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="for the trainer to be there (default: %(default)g)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        default=1,
        help="torch's threads in the worker (default: %(default)d)",
    )


def run(given: argparse.Namespace) -> int:
    """Serve until the trainer is done.

    Raises:
        ArgumentError: no address, or no token.
        LaunchError: the trainer can't be reached, or refused.
    """
    host, port = host_and_port("--join", given.join)
    if given.token_file is not None:
        os.environ["DISTCOLLECT_TOKEN_FILE"] = given.token_file
    token = read_token()
    if token is None:
        raise ArgumentError(
            "the trainer's token is missing: name the file that holds it by --token-file or "
            "DISTCOLLECT_TOKEN_FILE"
        )
    meeting = Meeting(host, port, token)
    supervise(lambda: meeting, rank=None, place=Place(None, given.threads), timeout_s=given.wait)
    return 0
