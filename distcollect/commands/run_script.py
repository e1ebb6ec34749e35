"""``distcollect run``: runs a script that does not call ``distcollect.run``, under any launcher."""

from __future__ import annotations

import argparse
import runpy
import sys
from functools import partial
from pathlib import Path

from distcollect.commands.argtypes import declare
from distcollect.errors import ArgumentError
from distcollect.launch.run import run as run_launched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = partial(declare, parser.add_argument)
    about = "a Python script; rank 0 of the launch runs it, and the other ranks are workers"
    add("script SCRIPT", about, type=Path)
    about = "its arguments: all that follows"
    rest = parser.add_argument("arguments", metavar="ARGUMENT", help=about, nargs="...")
    rest.required = False  # argparse of Python 3.12 and before would ask for it


def run(given: argparse.Namespace) -> int:
    """Run the script as the ``main`` of the launch; on other ranks, serve its collectors.

    Raises:
        ArgumentError: there is no such script.
        LaunchError: the ranks can't find each other.
    """
    if not given.script.is_file():
        raise ArgumentError(f"run {given.script}: there is no such file")
    run_launched(partial(_execute, str(given.script), given.arguments))
    return 0


def _execute(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script`` does."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
