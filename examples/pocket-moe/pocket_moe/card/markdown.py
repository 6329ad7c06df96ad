"""Paragraphs and tables of Markdown from plain values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from decimal import ROUND_DOWN, Context
from typing import Final

_WIDTH: Final = 120


def prose(*parts: str) -> str:
    """One paragraph, its parts joined by spaces, wrapped."""
    return textwrap.fill(" ".join(parts), _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the header; columns of numbers are aligned to the right."""
    numeric = [all(_is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    marks = ["---:" if number else "---" for number in numeric]
    lines = (" | ".join(cells) for cells in (rows[0], marks, *rows[1:]))
    return "".join(f"| {line} |\n" for line in lines)


def one_line(text: str) -> str:
    """For a cell of a table. Example: ``one_line("a | b\\nc") == "a \\\\| b / c"``."""
    return " / ".join(" ".join(line.split()) for line in text.strip().splitlines()).replace("|", "\\|")


def shortened(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."


def rounded_down(value: float, digits: int = 3) -> str:
    """Never more than ``value``, for a bound. Example: ``rounded_down(0.001798) == "0.00179"``."""
    if not math.isfinite(value):
        return f"{value:g}"
    kept = Context(prec=digits, rounding=ROUND_DOWN).create_decimal(repr(value))
    return f"{float(kept):.{digits}g}"


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell.replace(",", "").removesuffix(" M")))
    except ValueError:
        return False
