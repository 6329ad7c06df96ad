"""The launches of the small-T layer with tiles that no table has; else the tests of fused_moe take this path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from testkit.models.guarded import guarded
from testkit.models.moe_layers import DTYPES, Layer, exact_layer, quantised, random_layer
from testkit.models.tolerances import assert_close
from torch import Tensor

TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2, "PARTS_FP32": 1}
TRUNCATED = {torch.bfloat16: 12.0}
"""The interpreter cuts float32 to bfloat16 instead of rounding it: twice the error, in one direction."""


def small(layer: Layer, tiles: dict[str, int] | None = None, **more: Any) -> Tensor:
    from moe_kernels.small.kernel import small_moe

    tiles = TILES | (tiles or {})
    flags = {name: getattr(layer, name) for name in ("activation", "bias_in", "bias_down", "weights_on")} | more
    return small_moe(
        layer.x_TD, layer.w_in, layer.w_down, layer.ids_TK, layer.weights_TK, tiles_in=tiles, tiles_down=tiles, **flags
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(
    ("rows", "hidden", "width", "experts", "slots"),
    [
        (2, 64, 48, 8, 2),  # fewer pairs than experts: candidates are pairs
        (19, 32, 48, 4, 3),  # candidates are experts, one of them with more rows than a block
        (5, 40, 24, 6, 2),  # no size a multiple of its block
    ],
)
def test_equals_the_definition(
    rows: int, hidden: int, width: int, experts: int, slots: int, tma: int, dtype: torch.dtype
) -> None:
    layer = random_layer(rows, hidden, width, experts, slots, dtype=dtype)
    assert_close(small(layer, {"TMA": tma}), layer.expected(), TRUNCATED.get(dtype))


def test_too_many_pairs_to_invert_their_ranks_in_registers() -> None:
    layer = random_layer(270, 16, 16, 3, 2)
    assert_close(small(layer), layer.expected())


@pytest.mark.parametrize(("hidden", "width"), [(1, 1), (5, 3), (17, 33), (3, 16), (16, 3)])
def test_sizes_that_no_vector_load_fits(hidden: int, width: int) -> None:
    layer = random_layer(6, hidden, width, 4, 2, biased=True)
    # TMA would need rows of whole 16 bytes: the launcher must see that they are not.
    assert_close(small(layer, {"TMA": 1}), layer.expected())


@pytest.mark.parametrize("rows", [3, 21])
@pytest.mark.parametrize("experts", [2, 40])
def test_lists_from_a_launch_of_their_own(experts: int, rows: int) -> None:
    layer = exact_layer(rows, experts=experts, slots=2)
    assert torch.equal(small(layer, {"LISTS_LAUNCH": 1}).double(), layer.expected())


@pytest.mark.parametrize("choice", [{}, {"SPLIT_K": 3}, {"COMBINE_LAUNCH": 1}, {"SPLIT_K": 2, "COMBINE_LAUNCH": 1}])
@pytest.mark.parametrize("rows", [3, 21])
def test_ways_to_sum(choice: dict[str, int], rows: int) -> None:
    for weights_on in ("output", "input"):
        layer = random_layer(rows, 40, 80, 7, 3, biased=True).but(weights_on=weights_on)
        assert_close(small(layer, choice), layer.expected())


@pytest.mark.parametrize("parts_fp32", [0, 1])
def test_parts_in_half_or_float32(parts_fp32: int) -> None:
    layer = random_layer(9, 32, 32, 4, 2, dtype=torch.float16)
    assert_close(small(layer, {"PARTS_FP32": parts_fp32}), layer.expected())


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("slots", [1, 5])
def test_any_draw_of_ids_is_exact(slots: int, ids: torch.dtype) -> None:
    """Repeated experts in a row, absent ones, ids far outside the range; nothing is read of who was skipped."""
    for seed in range(4):
        layer = exact_layer(11, experts=(3, 60)[seed % 2], slots=1, seed=seed)
        draw = torch.Generator().manual_seed(seed)
        ids_TK = torch.randint(-2, 6, (11, slots), generator=draw)
        ids_TK[3, 0], ids_TK[4] = 2**31 - 1, -1
        weights_TK = torch.randint(0, 9, (11, slots), generator=draw) / 8
        present = (ids_TK >= 0) & (ids_TK < layer.w_down.shape[0])
        exact = layer.but(ids_TK=ids_TK.to(ids), weights_TK=weights_TK)
        expected_TD = exact.expected()
        actual_TD = small(exact.but(weights_TK=torch.where(present, weights_TK, torch.nan)))
        assert torch.equal(actual_TD.double(), expected_TD)


@pytest.mark.parametrize("experts", [2, 100])
def test_all_pairs_on_one_expert(experts: int) -> None:
    layer = exact_layer(37, experts=experts, slots=2).but(ids_TK=torch.full((37, 2), 1))
    assert torch.equal(small(layer).double(), layer.expected())


@pytest.mark.parametrize("rows", [1, 4, 30])
@pytest.mark.parametrize("combine_launch", [0, 1])
def test_no_pair_here_at_all(rows: int, combine_launch: int) -> None:
    layer = random_layer(rows).but(ids_TK=torch.full((rows, 2), -1))
    assert torch.equal(small(layer, {"COMBINE_LAUNCH": combine_launch}), torch.zeros_like(layer.x_TD))


def test_no_rows() -> None:
    assert small(random_layer(0)).shape == (0, 24)


def test_shard_of_experts_and_masked_tokens() -> None:
    whole = exact_layer(12, experts=6, slots=3)
    mine = torch.tensor([4, 1])
    local_E = torch.full((6,), -1, dtype=torch.int32)
    local_E[mine] = torch.arange(2, dtype=torch.int32)
    keep_T = torch.arange(12) % 3 != 0
    here_TK = torch.isin(whole.ids_TK, mine) & keep_T.unsqueeze(1)
    expected_TD = whole.but(ids_TK=torch.where(here_TK, whole.ids_TK, -1)).expected()
    shard = whole.but(w_in=whole.w_in[mine], w_down=whole.w_down[mine])
    assert torch.equal(small(shard, keep_T=keep_T, local_E=local_E).double(), expected_TD)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [0, 1])
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised(bits: int, group: int, tma: int, words: int, dtype: torch.dtype) -> None:
    layer, expected_TD = quantised(random_layer(3, 128, 128, 2, 1, dtype=dtype), bits, group)
    # 32 rows are too few for four warps to unpack by words.
    tiles = {"BLOCK_N": 64 if words else 32, "BLOCK_K": 128, "TMA": tma}
    assert_close(small(layer, tiles), expected_TD, TRUNCATED.get(dtype))


@pytest.mark.parametrize(("bits", "block_k"), [(4, 256), (8, 64)])
def test_quantised_in_other_blocks(bits: int, block_k: int) -> None:
    """More rows than a block, more groups than one, splits; steps of two int4 runs, and of half an int8 group."""
    layer = random_layer(18, 256, 256, 2, 2, dtype=torch.float16, activation="gelu", biased=True)
    layer, expected_TD = quantised(layer, bits, 128)
    assert_close(small(layer, {"BLOCK_N": 64, "BLOCK_K": block_k, "SPLIT_K": 2}), expected_TD)


@pytest.mark.parametrize(("width", "block_k", "most"), [(768, 256, 4), (1024, 256, 3), (80, 16, 3), (1, 128, 4)])
def test_no_split_is_empty(width: int, block_k: int, most: int) -> None:
    """One that began past the last column would read scales past the last row's."""
    from moe_kernels.small.kernel import runs

    count, depth = runs(width, block_k, most)
    assert count <= most
    assert depth % block_k == 0
    assert (count - 1) * depth < width <= count * depth


@pytest.mark.parametrize("combine_launch", [0, 1])
def test_more_splits_than_blocks(combine_launch: int) -> None:
    layer = random_layer(3, 128, 384, 2, 1, dtype=torch.float16).but(ids_TK=torch.tensor([[1], [0], [1]]))
    layer, expected_TD = quantised(layer, 4, 128)
    layer = layer.but(w_down=replace(layer.w_down, scales=guarded(layer.w_down.scales)))
    tiles = {"BLOCK_N": 64, "BLOCK_K": 128, "SPLIT_K": 4, "COMBINE_LAUNCH": combine_launch}
    assert_close(small(layer, tiles), expected_TD)
