"""How commands declare their arguments, parsers for the ``type=`` of argparse, and modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As for arguments in seconds: waits overflow with far longer times, and int() with infinity.
_LARGEST = 1e8


def import_from_here() -> None:
    """Make modules in the working folder importable, if no others have their names.

    ``python -m`` does that by itself, but a console script adds its own folder instead.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def declare(add_argument: Callable[..., object], name: str, about: str, **options: Any) -> None:
    """Declare an argument by argparse's ``add_argument``.

    Args:
        add_argument: of a parser or of a group.
        name: as in a usage line: ``"--seed S"`` is an option, whose value is called S in the help.
        about: the help; a default is added to it.
        options: the other arguments of ``add_argument``.
    """
    name, _, metavar = name.partition(" ")
    if metavar:
        options["metavar"] = metavar
    if options.get("default") is not None:
        about += " (default: %(default)s)"
    add_argument(name, help=about, **options)


def count(text: str) -> int:
    """A whole number, at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole(text, 0)


def above_0(text: str) -> float:
    """A number above 0, and at most 1e8: seconds that a wait can have as its limit, or GB."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0, and at most 1e8")
    return number


def writable(text: str) -> Path:
    """A file that can be written; it is made if there is none."""
    try:
        Path(text).open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: {error.strerror}; name a file in a folder that exists"
        ) from error
    return Path(text)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least {least}")
    return number
