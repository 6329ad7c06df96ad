"""The path for one row or a few, against the definition: every format, odd sizes, absent slots, order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.moe_layers import ACTIVATIONS, DTYPES, Layer, exact_layer, random_layer
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels.gemv import kernel as gemv_triton
from moe_kernels.gemv.kernel import gemv_moe
from moe_kernels.quant.op import dequantize_experts, quantize_experts

TILES = {"BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 1, "num_stages": 2, "PDL": 0}
QUANTISED_TILES = TILES | {"BLOCK_N": 128, "BLOCK_K": 128, "DOWN_BLOCK_K": 256}
FORMATS = [(8, 0), (8, 128), (4, 0), (4, 128)]
ROUNDINGS = {torch.float32: 128, torch.float16: 4, torch.bfloat16: 4}
"""With codes: the sum runs over code + offset, which costs float32 the bits of the offset."""


def run(layer: Layer, tiles: dict[str, int] = TILES) -> Tensor:
    return gemv_moe(
        layer.x_TD,
        layer.w_in,
        layer.w_down,
        layer.ids_TK,
        layer.weights_TK,
        activation=layer.activation,
        bias_in=layer.bias_in,
        bias_down=layer.bias_down,
        weights_on=layer.weights_on,
        tiles=tiles,
    )


def quantised(layer: Layer, bits: int, group: int) -> tuple[Layer, Tensor]:
    """The layer with packed weights, and its output by definition with the values that they stand for."""
    packed = [quantize_experts(weight, bits, group) for weight in (layer.w_in, layer.w_down)]
    values = [dequantize_experts(weight, torch.float64) for weight in packed]
    return layer.but(w_in=packed[0], w_down=packed[1]), layer.but(w_in=values[0], w_down=values[1]).expected()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch leaves unwritten and another reads must show."""
    empty = torch.Tensor.new_empty

    def new_empty(self: Tensor, *shape: Any, **options: Any) -> Tensor:
        fresh = empty(self, *shape, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "width", "experts", "slots"),
    [(1, 64, 32, 8, 2), (2, 75, 37, 4, 3), (4, 40, 24, 60, 1), (1, 1, 1, 1, 1), (1, 17, 50, 9, 8), (2, 32, 16, 5, 5)],
)
def test_plain_weights(rows: int, hidden: int, width: int, experts: int, slots: int, dtype: torch.dtype) -> None:
    layer = random_layer(rows, hidden, width, experts, slots, dtype=dtype)
    assert_close(run(layer), layer.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_packed_weights(bits: int, group: int, dtype: torch.dtype) -> None:
    layer, expected_TD = quantised(random_layer(2, 256, 128, 3, 2, dtype=dtype), bits, group)
    assert_close(run(layer, QUANTISED_TILES), expected_TD, ROUNDINGS[dtype])


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("block", [128, 256, 1024])
def test_rows_of_an_odd_number_of_groups(bits: int, group: int, block: int) -> None:
    """Scales are read in pairs; 384 columns are three groups, cut off by every tile but the first."""
    layer, expected_TD = quantised(random_layer(1, 384, 128, 2, 1), bits, group)
    assert_close(run(layer, QUANTISED_TILES | {"BLOCK_K": block}), expected_TD, ROUNDINGS[torch.float32])


def test_narrow_bytes() -> None:
    layer, expected_TD = quantised(random_layer(3, 48, 16, 5, 2), 8, 0)
    assert_close(run(layer), expected_TD, ROUNDINGS[torch.float32])


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("bits", "group"), [(32, 0), (8, 128), (4, 128)])
def test_any_depth_of_prefetch(bits: int, group: int, stages: int) -> None:
    """Three steps in the first launch, one in the second."""
    layer = random_layer(1, 384 if bits < 32 else 96, 128 if bits < 32 else 32, 2, 2)
    layer, expected_TD = quantised(layer, bits, group) if bits < 32 else (layer, layer.expected())
    tiles = (QUANTISED_TILES if bits < 32 else TILES) | {"num_stages": stages, "BLOCK_N": 64}
    assert_close(run(layer, tiles), expected_TD, ROUNDINGS[torch.float32])


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, weights_on: str) -> None:
    layer = random_layer(2, 24, 20, 4, 2, activation=activation, biased=True).but(weights_on=weights_on)
    assert_close(run(layer), layer.expected(), 64)


@pytest.mark.parametrize("bits", [32, 4])
def test_biases_are_not_scaled(bits: int) -> None:
    layer = random_layer(2, 128, 128, 3, 2, biased=True)
    layer, expected_TD = quantised(layer, 4, 0) if bits == 4 else (layer, layer.expected())
    assert_close(run(layer, QUANTISED_TILES), expected_TD, ROUNDINGS[torch.float32])


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_experts_elsewhere_are_skipped(id_type: torch.dtype) -> None:
    layer = random_layer(3, 24, 20, 4, 3)
    ids_TK = torch.tensor([[0, -1, 3], [4, 2, 2**31 - 1], [-1, -7, 4]]).to(id_type)
    # Weights of absent slots may be anything.
    weights_TK = layer.weights_TK.masked_fill((ids_TK < 0) | (ids_TK > 3), torch.nan)
    y_TD = run(layer.but(ids_TK=ids_TK, weights_TK=weights_TK))
    assert_close(y_TD, layer.but(ids_TK=ids_TK).expected())
    assert (y_TD[2] == 0).all()


def test_all_rows_on_one_expert_and_twice_in_a_row() -> None:
    layer = random_layer(3, 24, 20, 4, 2)
    layer = layer.but(ids_TK=torch.full((3, 2), 2))
    assert_close(run(layer), layer.expected())


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bits", [32, 4])
def test_a_broken_row_stays_alone(bits: int, value: float) -> None:
    """Plain rows end within a tile, and the next one begins with the broken value."""
    layer = random_layer(3, 128 if bits == 4 else 75, 128 if bits == 4 else 37, 3, 1)
    layer = quantised(layer, 4, 128)[0] if bits == 4 else layer
    whole_TD = run(layer, QUANTISED_TILES)
    x_TD = layer.x_TD.clone()
    x_TD[1, 0] = value
    broken_TD = run(layer.but(x_TD=x_TD), QUANTISED_TILES)
    assert torch.equal(broken_TD[[0, 2]], whole_TD[[0, 2]])
    assert not broken_TD[1].isfinite().any()


@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 5, 8]), st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_exact_numbers_come_out_exactly(rows: int, slots: int, seed: int) -> None:
    layer = exact_layer(rows, experts=8, slots=slots, seed=seed)
    assert torch.equal(run(layer).double(), layer.expected())


@pytest.mark.parametrize("slots", [2, 3, 8])
def test_the_sum_runs_in_slot_order(slots: int) -> None:
    """To the bit: what single slots return, weighted and added one after the other."""
    layer = exact_layer(2, experts=9, slots=slots)
    layer = layer.but(weights_TK=torch.rand(2, slots, generator=torch.Generator().manual_seed(slots)))
    one = torch.ones(2, 1)
    expected_TD = torch.zeros_like(layer.x_TD)
    for slot in range(slots):
        alone = layer.but(ids_TK=layer.ids_TK[:, slot : slot + 1].contiguous(), weights_TK=one)
        expected_TD = expected_TD + run(alone) * layer.weights_TK[:, slot : slot + 1]
    assert torch.equal(run(layer), expected_TD)


def test_rows_do_not_depend_on_their_batch() -> None:
    layer = random_layer(4, 24, 20, 5, 3)
    together_TD = run(layer)
    for row in range(4):
        only = slice(row, row + 1)
        alone = layer.but(x_TD=layer.x_TD[only], ids_TK=layer.ids_TK[only], weights_TK=layer.weights_TK[only])
        assert torch.equal(run(alone)[0], together_TD[row])


@pytest.mark.parametrize("rows", [0, 1])
def test_strided_inputs_and_no_rows(rows: int) -> None:
    layer = random_layer(2 * rows, 24, 20, 5, 2)
    wide = layer.but(x_TD=layer.x_TD[::2], ids_TK=layer.ids_TK[::2], weights_TK=layer.weights_TK.T.contiguous().T[::2])
    assert_close(run(wide), wide.expected())


def test_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name in ("gemv_in_kernel", "gemv_down_kernel"):
        kernel = getattr(gemv_triton, name)

        class Counted:
            def __init__(self, name: str, kernel: Any) -> None:
                self.name, self.kernel = name, kernel

            def __getitem__(self, grid: Any) -> Any:
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(gemv_triton, name, Counted(name, kernel))
    layer = random_layer(2, 24, 20, 5, 2)
    assert_close(run(layer), layer.expected())
    assert launched == ["gemv_in_kernel", "gemv_down_kernel"]
