"""The command line: ``python -m distcollect COMMAND``.

Each command has a module of its own, which is imported only when that command is given.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from distcollect.errors import DistCollectError
from distcollect.version import __version__

# The module of each, with add_arguments(parser) and run(arguments) -> exit status; a line of help.
_COMMANDS = {
    "bench": ("commands.bench", "compare collectors with a bare loop, for an env and a policy"),
    "cancel": ("integrations.slurm.cancel", "cancel the jobs of a run on a SLURM cluster"),
    "collect": ("commands.collect.command", "collect frames of an env and write them to disk"),
    "doctor": ("commands.doctor.command", "find out why hosts don't connect"),
    "report": ("commands.report.command", "make an HTML page about a run"),
    "run": ("commands.run_script", "run a script without distcollect.run, under a launcher"),
    "status": ("integrations.slurm.status", "show the jobs of a run on a SLURM cluster"),
    "submit": ("integrations.slurm.submit", "submit a training script to a SLURM cluster"),
    "top": ("commands.top", "show the state of a run"),
    "worker": ("commands.worker", "start a worker that joins a running trainer"),
}

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: arguments without the program's name; None: those of this process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="distcollect")
    parser.add_argument("--version", action="version", version=f"distcollect {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, about) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        if given[:1] == [name]:
            module = importlib.import_module(f"distcollect.{module_name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, refuse=command.error)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        hint = "; the options of a script stand after its name" * ("script" in parsed)
        parsed.refuse(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        status: int = parsed.run(parsed)
        print(end="", flush=True)
    except DistCollectError as error:
        print(f"distcollect: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # who reads the pipe has seen enough, as head has
        if parsed.command == "run":
            raise  # it may be the script's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be written
        return 128 + signal.SIGPIPE
    return status
