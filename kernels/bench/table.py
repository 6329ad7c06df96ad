"""Plain-text and markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

Cells = Sequence[Sequence[str]]


def markdown(header: Sequence[str], body: Cells) -> str:
    """Columns padded to equal width, so that it reads well in a terminal too."""
    widths = [max(len(line[at]) for line in (header, *body)) for at in range(len(header))]
    rule = ["-" * max(width, 3) for width in widths]
    return "\n".join(_line(cells, widths) for cells in (header, rule, *body))


def number(value: float | None) -> str:
    """Three significant digits, grouped thousands; "-" for None. Example: 17.62 -> "17.6", 10969.2 -> "10,969"."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(max(width, 3)) for cell, width in zip(cells, widths, strict=True)) + " |"
