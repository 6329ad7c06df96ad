"""The path for one row or a few, launched with tiles that no table has; else the tests of fused_moe take this path."""

from __future__ import annotations

import pytest
import torch
from testkit.models.moe_layers import CODE_ROUNDINGS, FORMATS, Layer, quantised, random_layer
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels.gemv.kernel import gemv_moe

TILES = {"BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 1, "num_stages": 2, "PDL": 0}
QUANTISED_TILES = TILES | {"BLOCK_N": 128, "BLOCK_K": 128, "DOWN_BLOCK_K": 256}


def run(layer: Layer, tiles: dict[str, int] = TILES) -> Tensor:
    flags = {name: getattr(layer, name) for name in ("activation", "bias_in", "bias_down", "weights_on")}
    return gemv_moe(layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK, tiles=tiles, **flags)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("block", [128, 256, 1024])
def test_rows_of_an_odd_number_of_groups(bits: int, group: int, block: int) -> None:
    """Scales are read in pairs; 384 columns are three groups, cut off by every tile but the first."""
    layer, expected_TD = quantised(random_layer(1, 384, 128, 2, 1), bits, group)
    assert_close(run(layer, QUANTISED_TILES | {"BLOCK_K": block}), expected_TD, CODE_ROUNDINGS[torch.float32])


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("bits", "group"), [(32, 0), (8, 128), (4, 128)])
def test_any_depth_of_prefetch(bits: int, group: int, stages: int) -> None:
    """Three steps in the first launch, one in the second."""
    layer = random_layer(1, 384 if bits < 32 else 96, 128 if bits < 32 else 32, 2, 2)
    layer, expected_TD = quantised(layer, bits, group) if bits < 32 else (layer, layer.expected())
    tiles = (QUANTISED_TILES if bits < 32 else TILES) | {"num_stages": stages, "BLOCK_N": 64}
    assert_close(run(layer, tiles), expected_TD, CODE_ROUNDINGS[torch.float32])


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
