"""Tiles made to fit: what the tables hold stays as it is, and whatever is asked of them fits an H200."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import tiles as table
from moe_kernels.fitting import ACCUMULATORS, BARRIER_BYTES, fitted, shared_bytes
from moe_kernels.tiles import Entry, load

H200 = "NVIDIA H200"
LIMIT = 227 * 1024
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0, "mxfp4": 0.5, "any": 2.0}
LARGE = [
    entry
    for file in ("NVIDIA_H200.json", "default.json")
    for entry in load(table.DIRECTORY / file)
    if entry.op in ("large.in", "large.down")
]


def asked(entry: Entry, **changes: Any) -> dict[str, Any]:
    gated = entry.op == "large.in" and dict(entry.shape).get("gated", 2) == 2
    row_bytes = 4 if entry.dtype == "fp32" else 2
    # Quantised weights that are not swapped have been written out before.
    swapped = entry.tiles["SWAP"] or not entry.dtype.startswith(("int", "fp8", "mxfp4"))
    return {
        "block_m": entry.tiles["BLOCK_M"],
        "matrices": 1 + gated,
        "weight_bytes": WEIGHT_BYTES[entry.dtype] if swapped else 2,
        "row_bytes": row_bytes,
        "limit": LIMIT,
    } | changes


@pytest.mark.parametrize("entry", LARGE, ids=lambda e: f"{e.op}-{e.dtype}-{dict(e.shape).get('d')}-{e.rows}")
def test_a_tuned_call_keeps_its_tiles(entry: Entry) -> None:
    assert fitted(entry.tiles, **asked(entry)) is entry.tiles


@given(
    st.sampled_from(LARGE),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1, 2]),
    st.sampled_from([0.5, 1, 2, 4]),
    st.sampled_from([2, 4]),
    st.sampled_from([64, 99, 163, 227]),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_asked_fits(
    entry: Entry, block_m: int, matrices: int, weight_bytes: float, row_bytes: int, limit_kib: int
) -> None:
    sizes: dict[str, Any] = {"block_m": block_m, "matrices": matrices, "row_bytes": row_bytes}
    found = fitted(entry.tiles, weight_bytes=weight_bytes, limit=limit_kib * 1024, **sizes)
    assert shared_bytes(found, weight_bytes=weight_bytes, **sizes) + BARRIER_BYTES <= limit_kib * 1024
    assert block_m * found["BLOCK_N"] * matrices <= ACCUMULATORS * 32 * found["num_warps"]
    assert found.keys() == entry.tiles.keys()
    changed = {name for name in found if found[name] != entry.tiles[name]}
    assert changed <= {"BLOCK_N", "BLOCK_K", "num_stages"}
    assert all(0 < found[name] < entry.tiles[name] for name in changed)


def test_blocks_for_plain_experts_are_halved_for_gated_ones() -> None:
    plain = {"BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    gated = fitted(plain, block_m=128, matrices=2, weight_bytes=2, row_bytes=2, limit=LIMIT)
    assert gated == {**plain, "BLOCK_N": 128}
    assert fitted(plain, block_m=128, matrices=1, weight_bytes=2, row_bytes=2, limit=LIMIT) is plain


def test_runs_of_int4_stay_whole() -> None:
    wide = {"BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}
    sizes: dict[str, Any] = {"block_m": 128, "matrices": 2, "weight_bytes": 0.5, "row_bytes": 2}
    assert fitted(wide, limit=64 * 1024, least_k=128, **sizes)["BLOCK_K"] == 128
    assert fitted(wide, limit=40 * 1024, least_k=32, **sizes)["BLOCK_K"] < 128


def test_gated_experts_do_not_take_the_blocks_of_plain_ones() -> None:
    pocket = {"depth": 256, "width": 128, "E": 16, "gated": 2}
    rows = 128 * 512 * 4  # nearest in rows and experts is an entry of plain experts with 256 columns
    assert table.tiles("large.in", shape=pocket, rows=rows, dtype="bf16", device_name=H200)["BLOCK_N"] <= 128
    plain = table.tiles("large.in", shape={**pocket, "gated": 1}, rows=rows, dtype="bf16", device_name=H200)
    assert plain["BLOCK_N"] == 256
