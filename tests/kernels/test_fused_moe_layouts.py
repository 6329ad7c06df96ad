"""fused_moe on tensors that lie unusually in memory: the right answer, or an ArgumentError that says "contiguous"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.models.layouts import LAYOUTS, rows_of_a_wider_one, strided, tail, transposed
from testkit.models.moe_layers import Layer, exact_layer, random_layer
from testkit.models.tolerances import assert_close

from moe_kernels import ArgumentError

pytestmark = pytest.mark.usefixtures("regime")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*random_layer(1, biased=True).tensors()])
def test_memory_layout_is_refused_or_harmless(rows: int, name: str, layout: Any) -> None:
    layer = random_layer(rows, hidden=16, width=8, experts=4, slots=2, biased=True)
    odd = layer.but(**{name: layout(layer.tensors()[name])})
    assert_right_or_refused(odd, layer.expected())


def test_expanded_inputs_are_refused_or_harmless() -> None:
    layer = random_layer(3, hidden=16, width=8, experts=4, slots=2)
    same = layer.but(
        x_TD=layer.x_TD[:1].expand(3, 16),
        ids_TK=layer.ids_TK[:1].expand(3, 2),
        weights_TK=torch.ones(1, 1).expand(3, 2),
    )
    assert_right_or_refused(same, same.expected())


def assert_right_or_refused(layer: Layer, expected_TD: torch.Tensor) -> None:
    try:
        y_TD = layer()
    except ArgumentError as refused:
        if "contiguous" not in str(refused):
            raise
    else:
        assert_close(y_TD, expected_TD)


@pytest.mark.parametrize("layout", [strided, transposed, rows_of_a_wider_one])
def test_layouts_of_rows_and_routing_work(layout: Any) -> None:
    """Views of x, ids and weights are everyday: never refused."""
    layer = random_layer(3, hidden=16, width=8, experts=4, slots=2)
    odd = layer.but(**{name: layout(layer.tensors()[name]) for name in ("x_TD", "ids_TK", "weights_TK")})
    assert_close(odd(), layer.expected())


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
