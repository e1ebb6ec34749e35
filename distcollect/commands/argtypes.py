"""Parsers of numbers on the command line, for the ``type=`` of argparse."""

from __future__ import annotations

import argparse

# As for arguments in seconds: waits overflow with far longer times, and int() with infinity.
_LARGEST = 1e8


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


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least {least}")
    return number
