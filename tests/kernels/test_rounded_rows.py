"""Layers whose rows are rounded to FP8 as well: the kernels, their reference, and how far both are from exact ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from testkit.models.moe_layers import Layer, random_layer
from testkit.models.quantised import random_weight
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import QuantisedWeight, backend, dequantize_experts, grouped_mlp, plan, quantize_experts, tiles
from moe_kernels.experts.rounded_rows import launch, reference

ROUNDINGS = {torch.float32: 1024, torch.bfloat16: 8}
"""Sums in another order round an element of h to the next code here and there; rows that are not rounded would be off
by 2 %: 80 times as much."""
TILES = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "GROUP_M": 2, "num_warps": 4, "num_stages": 2}


@contextmanager
def from_rows(count: int, block_n: int = 32) -> Iterator[None]:
    small: Mapping[str, int] = {**TILES, "BLOCK_N": block_n}
    regime = {"GEMV_ROWS": 0, "SMALL_ROWS": 0}
    ops = {"rounded_rows": {"FROM_ROWS": count}, "rounded.in": small, "rounded.down": small, "fused_moe": regime}
    with backend.forced("triton"), tiles.overridden(ops):
        yield


def layer_of(rows: int, hidden: int, width: int, scale_rows: int, **options: Any) -> Layer:
    plain = random_layer(rows, hidden, width, 3, 2, **options)
    form = {"codes": "e4m3", "scale_rows": scale_rows}
    packed = [quantize_experts(weight, 8, 128, **form) for weight in (plain.w_in, plain.w_down)]
    return plain.but(w_in=packed[0], w_down=packed[1])


def expected(layer: Layer, **more: Any) -> Tensor:
    named = {"weights_on": layer.weights_on, "keep_T": None, "local_E": None, "plan": None, **more}
    assert isinstance(layer.w_in, QuantisedWeight)
    assert isinstance(layer.w_down, QuantisedWeight)
    return reference.fused_moe(
        layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK, layer.activation,  # type: ignore[arg-type]
        layer.bias_in, layer.bias_down, **named,
    )  # fmt: skip


def edges(dtype: torch.dtype) -> Tensor:
    """Groups at the limits of scales and codes, the last one cut off: 200 columns. The interpreter reads subnormal
    numbers of 16 bits as others."""
    x_NI = torch.randn(9, 200, generator=torch.Generator().manual_seed(0))
    x_NI[1] = 0
    x_NI[2, :128] *= 448 / x_NI[2, :128].abs().max()
    x_NI[3, 5], x_NI[3, 140] = 448.0, 450.0
    x_NI[4] *= 1e-39 if dtype == torch.float32 else 1e-30
    x_NI[5] *= torch.logspace(-9, 0, 200)
    x_NI[6, 3], x_NI[7, 150] = torch.nan, -torch.inf
    x_NI[8] *= 1e4
    return x_NI.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_alike(dtype: torch.dtype) -> None:
    x_NI = edges(dtype)
    codes_NI, scales_GN = launch.round_rows(x_NI)
    wanted_NI, wanted_GN = reference.round_rows(x_NI)
    assert torch.equal(scales_GN.view(torch.int32), wanted_GN.view(torch.int32))
    finite_NI = (wanted_GN.isfinite().t().repeat_interleave(128, 1)).contiguous()
    assert torch.equal(codes_NI.float()[finite_NI], wanted_NI.float()[finite_NI])
    assert scales_GN[:, 3].tolist() == [1.0, 2.0]
    assert scales_GN.isnan().sum() == 2


def test_how_far_a_rounded_number_is() -> None:
    """Half a step of 3 bits, or of the smallest numbers: an eighth of 2^-6 of the scale, which is 2 / 448 at most."""
    x_NI = edges(torch.float32)[[0, 2, 3, 5, 8]]
    off_NI = (reference.rounded(x_NI) - x_NI).abs()
    largest_NG = torch.stack([part.abs().amax(1) for part in (x_NI[:, :128], x_NI[:, 128:])], dim=1)
    largest_NI = largest_NG.repeat_interleave(128, 1)[:, :200]
    assert (off_NI <= torch.maximum(x_NI.abs() / 16, largest_NI * 2 / 448 / 1024)).all()
    assert (off_NI > x_NI.abs() / 40).any()


SHAPES = [(256, 128, 128), (208, 48, 4), (144, 96, 96), (128, 128, 1)]
"""Hidden size, width and rows that share a scale: whole tiles, and groups, blocks and tiles that are cut off."""


@pytest.mark.parametrize(("hidden", "width", "scale_rows"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_equals_the_reference(hidden: int, width: int, scale_rows: int, dtype: torch.dtype, activation: str) -> None:
    scale_rows = scale_rows if hidden % scale_rows == 0 else 16
    layer = layer_of(19, hidden, width, scale_rows, dtype=dtype, activation=activation, biased=True)
    with from_rows(1):
        assert_close(layer(), expected(layer), ROUNDINGS[layer.x_TD.dtype])


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_pairs_that_take_no_part(weights_on: str) -> None:
    """Absent experts, a mask, a table of local experts, a plan, grouped rows; NaN stays in its row."""
    layer = layer_of(9, 128, 64, 64, biased=True).but(weights_on=weights_on)
    layer.ids_TK[2, 1] = -2
    layer.weights_TK[2, 1] = torch.nan
    layer.x_TD[4, 7] = torch.nan
    keep_T = torch.arange(9) % 4 != 1
    local_E = torch.tensor([1, 2, -1, 0], dtype=torch.int32)
    with from_rows(1):
        assert_close(layer(keep_T=keep_T), expected(layer, keep_T=keep_T), ROUNDINGS[torch.float32])
        assert_close(layer(local_E=local_E), expected(layer, local_E=local_E), ROUNDINGS[torch.float32])
        made = plan(layer.ids_TK, 3, block_rows=32)
        y_TD = layer(plan=made)
        assert_close(y_TD, expected(layer, plan=made), ROUNDINGS[torch.float32])
    assert y_TD.isnan().any(1).tolist() == [row == 4 for row in range(9)]


def test_grouped_rows() -> None:
    layer = layer_of(9, 128, 64, 64)
    counts_E = torch.tensor([4, 0, 3])
    with from_rows(1):
        y_ND = grouped_mlp(layer.x_TD, counts_E, layer.w_in, layer.w_down)
    ids_N1 = torch.tensor([0] * 4 + [2] * 3 + [-1] * 2).unsqueeze(1)
    assert_close(y_ND, expected(layer.but(ids_TK=ids_N1, weights_TK=torch.ones(9, 1))), ROUNDINGS[torch.float32])


def test_how_far_a_layer_is_from_one_whose_rows_are_not_rounded() -> None:
    """Rows lose 2.6 % on average, rms, before each of two products; sums of many keep that."""
    layer = layer_of(64, 512, 256, 128, activation="identity")
    exact = layer.but(w_in=dequantize_experts(layer.w_in), w_down=dequantize_experts(layer.w_down)).expected()
    with from_rows(1):
        off = float((layer().double() - exact).norm() / exact.norm())
    assert 0.02 < off < 0.045


@pytest.mark.parametrize("scale_rows", [32, 16])
def test_rows_of_a_tile_that_share_a_scale(scale_rows: int) -> None:
    """Blocks of 32 columns of the result: one number for a tile, or one for each half."""
    layer = layer_of(5, 128, 64, scale_rows)
    with from_rows(1):
        assert_close(layer(), expected(layer), ROUNDINGS[layer.x_TD.dtype])


def test_the_table_says_from_how_many_rows_on() -> None:
    """Default: never. Only FP8 with groups of 128 columns."""
    layer = layer_of(4, 128, 64, 64)
    with from_rows(0):
        plain_TD = layer()
    with from_rows(5):
        assert torch.equal(layer(), plain_TD)
    with from_rows(4):
        assert not torch.equal(layer(), plain_TD)
    assert tiles.tiles("rounded_rows", shape={"d": 128}, rows=8192, dtype="fp8")["FROM_ROWS"] == 0
    qwen = {"d": 2048, "f": 768, "E": 128, "k": 8, "gated": 2}
    h200 = [
        tiles.tiles("rounded_rows", shape=qwen, rows=rows, dtype=dtype, device_name="NVIDIA H200")["FROM_ROWS"]
        for rows, dtype in ((1, "fp8"), (8, "fp8"), (8192, "fp8"), (8192, "fp32"))
    ]
    assert h200 == [0, 1, 1, 0]
    assert not launch.takes(random_weight("int8 g128", 2, 64, 128))
    assert not launch.takes(random_weight("e4m3 channel", 2, 64, 128))
    assert launch.takes(random_weight("e4m3 4x128", 2, 64, 128))
