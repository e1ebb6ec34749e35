"""Medians and ratios of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements.

    Attributes:
        median: the median.
        low: the smallest value.
        high: the largest value.
        count: how many repeats gave a value.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Of the values that are not None; None if there are none."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        return cls(median(there), min(there), max(there), len(there))


def paired(
    numerators: Sequence[float | None], denominators: Sequence[float | None]
) -> list[float | None]:
    """The ratio within each repeat; None where a side is missing or the denominator is 0."""
    return [
        None if above is None or not below else above / below
        for above, below in zip(numerators, denominators, strict=True)
    ]


def best(*columns: Sequence[float | None]) -> list[float | None]:
    """The largest of several values within each repeat; None where all are missing."""
    return [
        max((value for value in row if value is not None), default=None)
        for row in zip(*columns, strict=True)
    ]
