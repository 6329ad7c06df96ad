"""fused_moe on tensors that lie unusually in memory: the right answer, or, where REFUSED says so, an ArgumentError."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.models.layouts import LAYOUTS, rows_of_a_wider_one, strided, tail, transposed
from testkit.models.moe_layers import exact_layer, random_layer
from testkit.models.pairwise import pairwise
from testkit.models.regimes import REGIMES_AND_ROWS
from testkit.models.tolerances import assert_close

from moe_kernels import ArgumentError

pytestmark = pytest.mark.usefixtures("regime")


REFUSED = {(name, layout) for name in ("w_in", "w_down") for layout in (strided, transposed, rows_of_a_wider_one)}
"""Views of matrices. Everything else works in each layout."""
GRID = [
    (name, layout, *regime_and_rows)
    for regime_and_rows, name, layout in pairwise(REGIMES_AND_ROWS, [*random_layer(1, biased=True).tensors()], LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout", "regime", "rows"), GRID)
def test_memory_layout_is_harmless_where_it_is_not_refused(name: str, layout: Any, rows: int) -> None:
    layer = random_layer(rows, hidden=16, width=8, experts=4, slots=2, biased=True)
    odd = layer.but(**{name: layout(layer.tensors()[name])})
    if (name, layout) in REFUSED:
        with pytest.raises(ArgumentError, match=f"{name} .* must be contiguous"):
            odd()
    else:
        assert_close(odd(), layer.expected())


@pytest.mark.parametrize("regime", ["torch"])
def test_the_grid_holds_so_many_refusals() -> None:
    assert (len(GRID), sum((name, layout) in REFUSED for name, layout, *_ in GRID)) == (63, 15)
    assert {(name, layout) for name, layout, *_ in GRID} >= REFUSED


def test_expanded_inputs_are_harmless() -> None:
    layer = random_layer(3, hidden=16, width=8, experts=4, slots=2)
    same = layer.but(
        x_TD=layer.x_TD[:1].expand(3, 16),
        ids_TK=layer.ids_TK[:1].expand(3, 2),
        weights_TK=torch.ones(1, 1).expand(3, 2),
    )
    assert_close(same(), same.expected())


@pytest.mark.parametrize("layout", [strided, tail])
def test_layouts_of_masks_and_tables_work(rows: int, layout: Any) -> None:
    layer = exact_layer(rows, slots=3)
    keep_T = torch.arange(rows) % 3 > 0
    local_E = torch.tensor([2, -1, 0, 1, 3, -1, 4], dtype=torch.int32)
    plain_TD = layer(keep_T=keep_T, local_E=local_E)
    assert torch.equal(layer(keep_T=layout(keep_T), local_E=layout(local_E)), plain_TD)


def test_columns_past_the_end_are_not_read() -> None:
    """What lies behind each row of x is NaN, and a width that no tile divides reaches for it."""
    layer = random_layer(6, hidden=23, width=9, slots=3)
    odd = layer.but(x_TD=rows_of_a_wider_one(layer.x_TD))
    assert_close(odd(), layer.expected())
