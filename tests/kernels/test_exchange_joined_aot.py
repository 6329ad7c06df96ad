"""What the compiler makes of joined calls' kernels on sm_90: locks and flags in order, wide copies, no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from testkit import aot

D, K = 2048, 8
WIDTHS = {"D": D, "K": K, "BLOCK_K": K, "BLOCK_D": D}
KERNELS = ["take_joined_kernel", "gather_joined_kernel", "send_joined_kernel"]


def compiled(kernel: str, slots: int = 1, rows: int = 1) -> aot.Compiled:
    types, constants = _arguments(kernel, slots)
    if "BLOCK_D" in constants:
        constants = {**constants, "TILE": triton.next_power_of_2(rows)}
    return aot.compile_sm90(f"moe_kernels.exchange_joined_triton:{kernel}", types, constants)


def _arguments(kernel: str, slots: int) -> tuple[dict[str, str], dict[str, Any]]:
    board = {"board": "*i64", "job": "*i64"}
    if kernel == "take_joined_kernel":
        sizes = dict.fromkeys(["place", "key", "bucket", "capacity", "exchange"], "i32")
        constants = {"K": K, "BLOCKS": 64, "BLOCK": 512, "TIMED": True}
        return {**board, "taken_CK": "*i32", "control": "*i64", **sizes}, constants
    if kernel == "gather_joined_kernel":
        return {**board, "x_CD": "*bf16", "taken_CK": "*i32", "weights_CK": "*fp32"}, WIDTHS
    tensors = {"y": "*bf16", **board, "taken_CK": "*i32", "counts_E": "*i64", "control": "*i64"}
    return {**tensors, "place": "i32", "y_at": "i32:16", "E": "i32"}, {**WIDTHS, "SLOTS": slots}


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (1, 4), (K, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills(kernel: str, slots: int, rows: int) -> None:
    aot.assert_no_stack(compiled(kernel, slots, rows))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_flag_is_released_after_the_rows_and_memory_after_the_flag(rows: int) -> None:
    ptx = compiled("send_joined_kernel", rows=rows).ptx
    flag = re.search(r"atom\.global\.sys\.release\.exch", ptx)
    assert flag is not None
    assert "st.global.v4" in ptx[: flag.start()]
    assert "bar.sync" in ptx[ptx.rindex("st.global.v4", 0, flag.start()) : flag.start()]
    free = re.search(r"(atom|red)\.global\.gpu\.release\.add", ptx)
    assert free is not None
    assert flag.start() < free.start()


def test_rows_are_copied_wide() -> None:
    ptx = compiled("gather_joined_kernel").ptx
    assert "st.global.v4" in ptx
    assert re.search(r"ld\.global\S*\.cg\S*\.v4", ptx)


def test_what_is_taken_is_acquired_and_the_lock_is_given_back_last() -> None:
    ptx = compiled("take_joined_kernel").ptx
    assert re.search(r"(atom|ld)\.global\.sys\.acquire\.", ptx), "flags of other GPUs"
    held = re.search(r"atom\.global\.acquire\.gpu\.cas", ptx)
    given_back = [match.start() for match in re.finditer(r"atom\.global\.gpu\.release\.exch", ptx)]
    assert held is not None
    assert given_back
    assert held.start() < given_back[-1]
    assert "bar.sync" in ptx[held.start() : given_back[-1]]
    assert "globaltimer" in ptx
