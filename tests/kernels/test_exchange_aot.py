"""What the compiler makes of the exchange's kernels on sm_90: flags other GPUs see in order, wide copies, no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from testkit import aot

D, K = 2048, 8
WIDTHS = {"D": D, "K": K, "BLOCK_K": K, "BLOCK_D": D}
WAITS = ["take_rows_kernel", "wait_answers_kernel", "sum_answers_kernel"]
SENDS = ["send_rows_kernel", "send_answers_kernel"]


def compiled(kernel: str, slots: int = 1, rows: int = 1) -> aot.Compiled:
    types, constants = _arguments(kernel, slots)
    if "BLOCK_D" in constants:
        constants = {**constants, "ROWS": rows, "TILE": triton.next_power_of_2(rows)}
    return aot.compile_sm90(f"moe_kernels.exchange_triton:{kernel}", types, constants)


def _arguments(kernel: str, slots: int) -> tuple[dict[str, str], dict[str, Any]]:
    control, counts, ids = {"control": "*i64"}, {"counts_E": "*i64"}, {"ids_TK": "*i64"}
    if kernel == "send_rows_kernel":
        sizes = dict.fromkeys(["rows", "bucket", "exchange"], "i32")
        places = dict.fromkeys(["stride_x", "section", "x_at", "ids_at", "weights_at", "E"], "i32:16")
        weights = {"weights_TK": "*fp32", "group_of_E": "*i32"}
        return {"x": "*bf16", **ids, **weights, **counts, **control, **sizes, **places}, WIDTHS
    if kernel == "take_rows_kernel":
        tensors = {"flags": "*i64", "ids_RK": "*i32", "taken_RK": "*i32", **counts, **control}
        sizes = dict.fromkeys(["blocks", "pairs", "exchange", "E"], "i32")
        return tensors | sizes, {"BLOCKS": 64, "BLOCK": 1024, "TIMED": True}
    if kernel == "send_answers_kernel":
        sizes = {"bucket": "i32", "exchange": "i32", "section": "i32:16", "y_at": "i32:16"}
        return {"y": "*bf16", "taken_RK": "*i32", **control, **sizes}, {**WIDTHS, "SLOTS": slots}
    if kernel == "wait_answers_kernel":
        sizes = {"blocks": "i32", "exchange": "i32", "section": "i32:16", "G": "i32"}
        return control | sizes, {"BLOCKS": 64, "TIMED": True}
    tensors = {**ids, "weights_TK": "*fp32", "group_of_E": "*i32", **control, "y": "*bf16"}
    sizes = {"rows": "i32", "exchange": "i32", "section": "i32:16", "y_at": "i32:16", "E": "i32", "G": "i32"}
    return tensors | sizes, {**WIDTHS, "SLOTS": slots, "WAITS": True, "TIMED": True}


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (1, 3), (K, 1)])
@pytest.mark.parametrize("kernel", WAITS + SENDS)
def test_nothing_spills(kernel: str, slots: int, rows: int) -> None:
    aot.assert_no_stack(compiled(kernel, slots, rows))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kernel", SENDS)
def test_a_flag_is_released_to_other_gpus_after_the_rows(kernel: str, rows: int) -> None:
    ptx = compiled(kernel, rows=rows).ptx
    flag = re.search(r"atom\.global\.sys\.release\.exch", ptx)
    assert flag is not None
    assert "st.global.v4" in ptx[: flag.start()]
    assert "bar.sync" in ptx[ptx.rindex("st.global.v4", 0, flag.start()) : flag.start()]


@pytest.mark.parametrize("kernel", WAITS)
def test_flags_are_acquired_from_other_gpus_and_lateness_is_looked_at(kernel: str) -> None:
    ptx = compiled(kernel).ptx
    assert re.search(r"(atom|ld)\.global\.sys\.acquire\.", ptx)
    assert "globaltimer" in ptx
