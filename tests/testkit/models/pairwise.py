"""Grids of parameters, thinned: every two values of different axes meet in some row, and the rows never change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis; of those that add the most new pairs the first one comes next."""
    pairs = list(combinations(range(len(axes)), 2))
    rows = [*product(*(range(len(axis)) for axis in axes))]
    open_pairs = {(a, b, row[a], row[b]) for row in rows for a, b in pairs}
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: sum((a, b, row[a], row[b]) in open_pairs for a, b in pairs))
        open_pairs -= {(a, b, best[a], best[b]) for a, b in pairs}
        chosen.append(tuple(axis[at] for axis, at in zip(axes, best, strict=True)))
    return chosen
