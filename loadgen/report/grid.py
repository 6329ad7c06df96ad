"""A table as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.report.table import Table

_WIDTH, _CELL = 150, 48
"""Characters of a line, and of a cell where there are several, beyond which they are cut."""


def grid(table: Table) -> str:
    """Returns a table with columns one below the other; figures are at the right.

    >>> print(grid(Table(title="Ends", rows=[("ok", "1,200"), ("failed", "7")])))
    Ends
      ok      1,200
      failed      7
    """
    most = _WIDTH if max((len(row) for row in table.rows), default=0) < 3 else _CELL
    rows = [[_cut(cell, most) for cell in row] for row in ([table.head] if table.head else []) + list(table.rows)]
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max(map(len, rows)))]
    return "\n".join([table.title, *("  " + _line(row, widths, table.text) for row in rows)])


def _line(row: Sequence[str], widths: Sequence[int], text: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if at == 0 or at in text else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    return "  ".join(cells).rstrip()


def _cut(cell: str, most: int) -> str:
    clean = printable(cell)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def printable(text: str) -> str:
    """Returns ``text`` without what a terminal would obey: words of other people are in it."""
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))
