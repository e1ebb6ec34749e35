"""Tables and numbers as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count


def counted(number: int, thing: str) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def text_table(rows: Iterable[Sequence[str]], left: Collection[int] = ()) -> str:
    """Align columns, two spaces apart; the heading, if there is one, is the first row.

    Args:
        rows: all of the same length.
        left: the columns that are aligned to the left, counted from 0; the others are aligned to
            the right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def aligned(column: int, cell: str) -> str:
        return cell.ljust(widths[column]) if column in left else cell.rjust(widths[column])

    return "\n".join("  ".join(map(aligned, count(), row)).rstrip() for row in rows)
