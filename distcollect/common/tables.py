"""Tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence


def text_table(rows: Iterable[Sequence[str]], left: Collection[int] = ()) -> str:
    """Align columns, two spaces apart; the heading, if there is one, is the first row.

    Args:
        rows: all of the same length.
        left: the columns that are aligned to the left, counted from 0; the others are aligned to
            the right.
    """
    # Not at the top: a worker process imports this module, and prints no table.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    rows = list(rows)
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(len(rows[0])):
        table.add_column(justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    width = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    # In a notebook rich would show the table instead of writing it to the file.
    Console(file=text, width=width, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
