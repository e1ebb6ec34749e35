"""Delays between attempts."""

from __future__ import annotations

_MOST_DOUBLINGS = 30  # more would overflow, and every limit is reached before


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait before the next attempt, after ``failures`` ones in a row failed.

    No pause after the first failure, ``first_s`` after the second, then twice as long each time,
    but never more than ``longest_s``.
    """
    if failures <= 1:
        return 0.0
    return min(first_s * 2.0 ** min(failures - 2, _MOST_DOUBLINGS), longest_s)
