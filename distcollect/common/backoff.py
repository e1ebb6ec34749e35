"""Delays between attempts."""

from __future__ import annotations


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """The pause before another try: none after the first failure in a row, then doubling."""
    if failures <= 1:
        return 0.0
    return min(first_s * 2.0 ** min(failures - 2, _MOST_DOUBLINGS), longest_s)


_MOST_DOUBLINGS = 30  # more overflow in the end, and no pause is as long
