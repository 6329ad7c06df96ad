"""A table of words, for every kind of report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST = 500
"""Characters of a setting, or of an error's example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """``head`` is empty where the first column has names. The first column is text; ``text`` numbers the others that
    are, and the rest are figures."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    text: Sequence[int] = ()
    note: str = ""


def pairs(title: str, rows: Iterable[tuple[str, str | None]], note: str = "") -> Table:
    """Returns a table of names and values; those without a value are left out."""
    return Table(title=title, rows=[(name, value) for name, value in rows if value], text=(1,), note=note)
