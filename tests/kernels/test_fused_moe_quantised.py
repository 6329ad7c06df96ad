"""fused_moe and grouped_mlp with int8 and int4 weights: what they return with the weights' exact values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from testkit.models.layouts import LAYOUTS, rows_of_a_wider_one, strided
from testkit.models.moe_layers import CODE_ROUNDINGS, DTYPES, FORMATS, Layer, quantised, random_layer
from testkit.models.pairwise import pairwise
from testkit.models.regimes import REGIMES, larger_tiles
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, dequantize_experts, grouped_mlp, quantize_experts

pytestmark = pytest.mark.usefixtures("regime")


def run(layer: Layer) -> Tensor:
    with larger_tiles():
        return layer()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_equals_the_weights_values(bits: int, group: int, dtype: torch.dtype) -> None:
    layer, expected_TD = quantised(random_layer(2, 256, 128, 3, 2, dtype=dtype), bits, group)
    assert_close(run(layer), expected_TD, CODE_ROUNDINGS[dtype])


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_biases_absent_slots_and_input_weights(bits: int, group: int) -> None:
    layer = random_layer(3, 128, 128, 3, 2, activation="gelu", biased=True).but(weights_on="input")
    layer.ids_TK[::2, 1] = -1
    layer, expected_TD = quantised(layer, bits, group)
    assert_close(run(layer), expected_TD, CODE_ROUNDINGS[torch.float32])


def test_narrow_matrices_of_bytes() -> None:
    layer, expected_TD = quantised(random_layer(3, 48, 16, 5, 2), 8, 0)
    assert_close(run(layer), expected_TD)


@pytest.mark.parametrize("which", ["w_in", "w_down"])
def test_one_matrix_may_stay_plain(which: str) -> None:
    plain = random_layer(2, 128, 128, 3, 2)
    packed = quantize_experts(getattr(plain, which), 4, 128)
    values = plain.but(**{which: dequantize_experts(packed, torch.float64)})
    assert_close(run(plain.but(**{which: packed})), values.expected(), CODE_ROUNDINGS[torch.float32])


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_grouped_rows(bits: int, group: int) -> None:
    plain = random_layer(4, 128, 128, 3, 1, activation="relu")
    counts_E = torch.tensor([1, 0, 2], dtype=torch.int32)
    plain = plain.but(ids_TK=torch.tensor([[0], [2], [2], [-1]]), weights_TK=torch.ones(4, 1))
    layer, expected_ND = quantised(plain, bits, group)
    with larger_tiles():
        y_ND = grouped_mlp(layer.x_TD, counts_E, layer.w_in, layer.w_down, activation="relu")
    assert_close(y_ND, expected_ND, CODE_ROUNDINGS[torch.float32])


def test_other_experts_are_not_read() -> None:
    layer = random_layer(2, 128, 128, 3, 1)
    layer.ids_TK[:] = 1
    layer, expected_TD = quantised(layer, 4, 128)
    for weight in (layer.w_in, layer.w_down):
        weight.scales[[0, 2]] = torch.nan
    assert_close(run(layer), expected_TD, CODE_ROUNDINGS[torch.float32])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_row_stays_alone(value: float) -> None:
    layer, _ = quantised(random_layer(3, 128, 128, 3, 1), 4, 128)
    x_TD = layer.x_TD.clone()
    x_TD[1, 0] = value
    broken_TD = run(layer.but(x_TD=x_TD))
    assert torch.equal(broken_TD[[0, 2]], run(layer)[[0, 2]])
    assert not broken_TD[1].isfinite().any()


REFUSED = {("scales", strided), ("scales", rows_of_a_wider_one), *(("packed", layout) for layout in LAYOUTS)}
"""Scales of one column lie as before when they are transposed; packed bytes are read in words, so alignment counts."""
GRID = pairwise(REGIMES, LAYOUTS, ["x_TD", "packed", "scales"])


@pytest.mark.parametrize(("regime", "layout", "part"), GRID)
def test_memory_layout_is_harmless_where_it_is_not_refused(part: str, layout: Callable[[Tensor], Tensor]) -> None:
    layer, expected_TD = quantised(random_layer(2, 128, 128, 3, 1, dtype=torch.float16, activation="relu"), 4, 128)
    if (part, layout) in REFUSED:
        with pytest.raises(ArgumentError, match="must be contiguous"):
            replace(layer.w_in, **{part: layout(getattr(layer.w_in, part))})
    elif part == "x_TD":
        assert_close(run(layer.but(x_TD=layout(layer.x_TD))), expected_TD)
    else:
        odd = layer.but(w_in=replace(layer.w_in, **{part: layout(getattr(layer.w_in, part))}))
        assert_close(run(odd), expected_TD)


@pytest.mark.parametrize("regime", ["torch"])
def test_the_grid_holds_so_many_refusals() -> None:
    assert (len(GRID), sum((part, layout) in REFUSED for _, layout, part in GRID)) == (20, 7)
    assert {(part, layout) for _, layout, part in GRID} >= REFUSED


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((256, 128, 3), r"w_in.*\(3, 256, 128\).*found.*\(3, 256, 256\)"),
        ((128, 256, 3), r"w_(in|down).*found.*\(3, (512|128), (128|256)\)"),
        ((128, 128, 4), r"w_(in|down).*found.*\(4, "),
    ],
)
def test_wrong_shapes_are_named(sizes: tuple[int, int, int], words: str) -> None:
    layer, other = random_layer(5, 128, 128, 3), random_layer(5, *sizes)
    packed = quantize_experts(other.w_in, 8, 0)
    with pytest.raises(ArgumentError, match=words):
        run(layer.but(w_in=packed))
