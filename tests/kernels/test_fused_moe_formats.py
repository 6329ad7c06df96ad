"""fused_moe with weights of every format in every regime: what it returns with the numbers that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from testkit.models.moe_layers import CODE_ROUNDINGS, Layer, random_layer
from testkit.models.quantised import KINDS, random_weight
from testkit.models.regimes import larger_tiles
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, QuantisedWeight, dequantize_experts, fold_order, grouped_mlp, plan, tiles
from moe_kernels.experts import kernel as experts_kernel
from moe_kernels.small.arguments import in_words, matrices

pytestmark = pytest.mark.usefixtures("regime")
MIXED = [kind for kind in KINDS if not random_weight(kind, 1, 4, 128).plain]
IN_HALVES = ["int4 g64 zeros", "e4m3 4x128", "e2m1 g32"]
UNORDERED = [kind for kind in MIXED if "ordered" not in KINDS[kind]]


def layer_of(kind: str, rows: int, hidden: int, width: int, experts: int = 3, **options: Any) -> tuple[Layer, Tensor]:
    plain = random_layer(rows, hidden, width, experts, 2, **options)
    w_in = random_weight(kind, experts, plain.w_in.shape[1], hidden)
    w_down = random_weight(kind if kind in UNORDERED else "int4 g32", experts, hidden, width, seed=1)
    return plain.but(w_in=w_in, w_down=w_down), by_definition(plain, w_in, w_down)


def by_definition(plain: Layer, w_in: QuantisedWeight, w_down: QuantisedWeight) -> Tensor:
    numbers = [dequantize_experts(weight, torch.float64) for weight in (w_in, w_down)]
    return plain.but(w_in=numbers[0], w_down=numbers[1]).expected()


def run(layer: Layer, **more: Any) -> Tensor:
    with larger_tiles():
        return layer(**more)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in MIXED), *((kind, torch.bfloat16) for kind in IN_HALVES)]
)
def test_equals_the_weights_numbers(kind: str, dtype: torch.dtype) -> None:
    """208 and 48 columns end inside of a run of the layout and of a group."""
    layer, expected_TD = layer_of(kind, 2, 208, 48, dtype=dtype)
    assert_close(run(layer), expected_TD, CODE_ROUNDINGS[dtype])


@pytest.mark.parametrize("kind", ["e2m1 g32", "e4m3 4x128"])
def test_small_floats_that_are_unpacked_by_words(kind: str) -> None:
    """192 columns are one run and a half, 64 half a run; both matrices meet columns in the words' order."""
    layer, expected_TD = layer_of(kind, 3, 192, 64, dtype=torch.bfloat16, biased=True, activation="swiglu_oai")
    with larger_tiles():
        chosen = tiles.tiles("small.in", shape={}, rows=1, dtype="bf16")
        assert in_words(matrices(layer.w_in), layer.x_TD, chosen)  # type: ignore[arg-type]
    assert_close(run(layer), expected_TD, CODE_ROUNDINGS[torch.bfloat16])


def test_scales_of_words_reach_from_the_least_to_a_large_one() -> None:
    layer, _ = layer_of("e2m1 g32", 2, 128, 64, dtype=torch.bfloat16)
    scales = layer.w_in.scales.clone()  # type: ignore[union-attr]
    scales[:, 0::4], scales[:, 1::4] = 1, 190
    w_in = replace(layer.w_in, scales=scales)  # type: ignore[type-var]
    small = layer.but(w_in=w_in, x_TD=layer.x_TD * 2.0**-60)
    assert_close(run(small), by_definition(small, w_in, layer.w_down), CODE_ROUNDINGS[torch.bfloat16])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["e2m1 g32", "int4 g64 order"])
def test_a_layer_of_gpt_oss(kind: str) -> None:
    """Biases, clamped swiglu, an absent expert, a narrow share of its 2,880 columns: 90 groups of 32 are 22.5 runs."""
    layer, _ = layer_of(kind, 2, 192, 96, activation="swiglu_oai", biased=True)
    layer.ids_TK[1, 0] = -1
    expected_TD = by_definition(layer, layer.w_in, layer.w_down)  # type: ignore[arg-type]
    assert_close(run(layer), expected_TD, CODE_ROUNDINGS[torch.float32])


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_columns_in_an_order_of_their_own(weights_on: str) -> None:
    """With a plan, a table of local experts, a mask; grouped rows too. NaN of an absent slot goes nowhere."""
    layer, _ = layer_of("int4 g64 order", 3, 128, 64)
    layer = layer.but(weights_on=weights_on)
    layer.ids_TK[2, 1] = -2
    layer.weights_TK[2, 1] = torch.nan
    expected_TD = by_definition(layer, layer.w_in, layer.w_down)  # type: ignore[arg-type]
    with larger_tiles():
        made = plan(layer.ids_TK, 3, block_rows=16)
        assert_close(layer(plan=made), expected_TD, CODE_ROUNDINGS[torch.float32])
    local_E = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
    moved = layer.but(ids_TK=layer.ids_TK + 1)
    assert_close(run(moved, local_E=local_E), expected_TD, CODE_ROUNDINGS[torch.float32])
    kept_TD = run(layer, keep_T=torch.tensor([True, False, True]))
    assert_close(kept_TD[[0, 2]], expected_TD[[0, 2]], CODE_ROUNDINGS[torch.float32])
    assert not kept_TD[1].any()
    grouped = layer.but(ids_TK=torch.tensor([[0], [2], [-1]]), weights_TK=torch.ones(3, 1), weights_on="output")
    expected_ND = by_definition(grouped, layer.w_in, layer.w_down)  # type: ignore[arg-type]
    with larger_tiles():
        y_ND = grouped_mlp(layer.x_TD, torch.tensor([1, 0, 1]), layer.w_in, layer.w_down)
    assert_close(y_ND, expected_ND, CODE_ROUNDINGS[torch.float32])


@pytest.mark.parametrize("regime", ["torch"])
@pytest.mark.parametrize("kind", ["int4 g64 order", "int4 g32", "dense"])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_the_order_of_the_second_matrix_is_folded_into_the_first(kind: str, activation: str) -> None:
    plain = random_layer(4, 128, 64, 3, 2, activation=activation, biased=True)
    assert isinstance(plain.w_in, Tensor)
    w_in = plain.w_in if kind == "dense" else random_weight(kind, 3, plain.w_in.shape[1], 128)
    w_down = random_weight("int4 g64 order", 3, 128, 64, seed=1)
    numbers = w_in if isinstance(w_in, Tensor) else dequantize_experts(w_in)
    expected_TD = plain.but(w_in=numbers, w_down=dequantize_experts(w_down)).expected()
    with pytest.raises(ArgumentError, match=r"columns in h's order, found int4 g64 order.*fold_order"):
        plain.but(w_in=w_in, w_down=w_down)()
    folded = dict(zip(("w_in", "w_down", "bias_in"), fold_order(w_in, w_down, plain.bias_in), strict=True))
    assert_close(plain.but(**folded)(), expected_TD)


@pytest.mark.parametrize("regime", ["torch"])
def test_what_cannot_be_folded() -> None:
    w_down = random_weight("int4 g64 order", 3, 128, 64)
    with pytest.raises(ArgumentError, match=r"rows of w_in e4m3 4x128 share scales"):
        fold_order(random_weight("e4m3 4x128", 3, 64, 128), w_down)
    with pytest.raises(ArgumentError, match=r"must have a row, or two, for each column of w_down \(3, 128, 64\)"):
        fold_order(torch.ones(3, 96, 128), w_down)


@pytest.mark.parametrize("kind", ["int4 g128", "e4m3 4x128"])
@pytest.mark.parametrize("regime", ["large"])
def test_large_products_unpack_a_few_experts_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five experts, two at a time; never more numbers at once than that."""
    layer, _ = layer_of(kind, 9, 128, 64, experts=5, biased=True)
    whole_TD = run(layer)
    monkeypatch.setattr(experts_kernel, "UNPACKED_BYTES", 2 * 128 * 128 * 4 + 1)
    sizes: list[int] = []

    def counted(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
        numbers = dequantize_experts(weight, dtype)
        sizes.append(numbers.nbytes)
        return numbers

    monkeypatch.setattr(experts_kernel, "dequantize_experts", counted)
    assert torch.equal(run(layer), whole_TD)
    assert len(sizes) == 3 + 2
    assert max(sizes) <= experts_kernel.UNPACKED_BYTES
    biased = replace(layer, w_in=layer.w_in)
    assert_close(whole_TD, by_definition(biased, layer.w_in, layer.w_down), CODE_ROUNDINGS[torch.float32])  # type: ignore[arg-type]
