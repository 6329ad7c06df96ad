"""No kernel of an expert layer touches memory past its tensors, whatever its tiles leave over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from testkit.models.guarded import guarded
from testkit.models.moe_layers import FORMATS, Layer, quantised, random_layer
from testkit.models.regimes import larger_tiles, regime
from testkit.models.tolerances import assert_close

from moe_kernels import ArgumentError

NAMES = ("x_TD", "w_in", "w_down", "weights_TK", "bias_in", "bias_down")


def behind_guards(layer: Layer, short: int = 0) -> Layer:
    """The last expert, behind whose weights nothing follows, is chosen for certain."""
    layer.ids_TK[-1, 0] = layer.w_down.shape[0] - 1
    return layer.but(ids_TK=guarded(layer.ids_TK), **{n: guarded(getattr(layer, n), short=short) for n in NAMES})


@pytest.mark.usefixtures("regime")
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(("hidden", "width"), [(24, 20), (32, 24), (16, 8)])
def test_sizes_that_fill_no_tile(hidden: int, width: int, activation: str, short: int) -> None:
    """short 1: not aligned for TMA, so weights come through pointers."""
    layer = random_layer(5, hidden, width, 3, 2, activation=activation, biased=True, dtype=torch.float16)
    assert_close(behind_guards(layer, short)(), layer.expected())


@pytest.mark.usefixtures("regime")
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_quantised(bits: int, group: int) -> None:
    layer = behind_guards(random_layer(3, 128, 384, 3, 2, biased=True, dtype=torch.float16))
    layer, expected_TD = quantised(layer, bits, group)
    for name in ("w_in", "w_down"):
        stored = getattr(layer, name)
        layer = layer.but(**{name: replace(stored, packed=guarded(stored.packed), scales=guarded(stored.scales))})
    with larger_tiles():
        assert_close(layer(), expected_TD)


def test_more_tiles_than_a_grid_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid's second axis ends at 65,535: bands of 2 tiles of 16 rows here."""
    from moe_kernels.grouped_gemm.swapped import launch as swapped

    tiles = {"GROUP_M": 2, "BLOCK_M": 16}
    swapped.check_bands(65_535 * 32 - 16 * 4, 4, tiles)
    with pytest.raises(ArgumentError, match=r"ids must number about 2097120 at most, .*found 2097120"):
        swapped.check_bands(65_535 * 32, 4, tiles)
    monkeypatch.setattr(swapped, "MAX_BANDS", 2)
    layer = random_layer(24, experts=3, slots=2)
    smaller = random_layer(4, experts=3, slots=2)
    with regime("swapped"):
        with pytest.raises(ArgumentError, match=r"ids must number about 64 at most, .*found 48: pass fewer rows"):
            layer()
        assert_close(smaller(), smaller.expected())
