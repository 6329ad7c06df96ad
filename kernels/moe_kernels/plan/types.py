"""The order in which grouped kernels take pairs of rows and chosen experts: what :func:`moe_kernels.plan` makes.

Legend: T rows, K slots per row, S = T x K pairs (pair p = t x K + k), E experts here, M tiles at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

FirstCome = Literal["token", "slot"]
"""Who is served first where capacity is short: rows in order, or everyone's slot 0 before anyone's slot 1 (GShard)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Grouped position n holds pair ``order_S[n]``, which is row ``order_S[n] // slots`` of the input."""

    order_S: Tensor
    """int32: pairs sorted by expert, ties by pair; from ``ends_E[-1]`` on those that no expert takes, in pair order."""
    place_S: Tensor
    """int32: inverse of ``order_S``: the grouped position of a pair, -1 if it is dropped or its expert elsewhere."""
    ends_E: Tensor
    """int32: expert e owns grouped positions ``ends_E[e - 1]..ends_E[e]`` (``grouped_mm``'s ``offs``)."""
    slots: int
    """K."""
    block_rows: int
    """Rows of a tile; the last tile of an expert may have fewer."""
    tile_expert_M: Tensor
    """int32: the tile's expert, ascending; -1 past the last tile. M = ceil(S / block_rows) + min(E, S)."""
    tile_row_M: Tensor
    """int32: the tile's first grouped position; -1 past the last tile."""
    tile_count_1: Tensor
    """int32: how many tiles there are."""
    dropped_1: Tensor
    """int32: how many pairs capacity dropped."""


def tile_bound(pairs: int, experts: int, block_rows: int) -> int:
    """M: every expert with a row has at most one tile that is not full."""
    return -(-pairs // block_rows) + min(experts, pairs)
