"""What the compiler makes of the exchange's kernels on sm_90: flags other GPUs see in order, wide copies, no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from testkit.gpu import aot

D, K = 2048, 8
WIDTHS = {"D": D, "K": K, "BLOCK_K": K, "BLOCK_D": D}
COUNTERS = ["take_rows_kernel", "send_answers_kernel"]
WAITS = [(kernel, False) for kernel in ("take_rows_kernel", "wait_answers_kernel", "sum_answers_kernel")]
WAITS.append(("take_rows_kernel", True))
SENDS = [("send_rows_kernel", False), ("send_answers_kernel", False), ("send_answers_kernel", True)]


def compiled(kernel: str, slots: int = 1, rows: int = 1, *, counts: bool) -> aot.Compiled:
    types, constants = _arguments(kernel, slots, counts)
    if "BLOCK_D" in constants:
        constants = {**constants, "ROWS": rows, "TILE": triton.next_power_of_2(rows)}
    return aot.compile_sm90(f"moe_kernels.exchange.kernel:{kernel}", types, constants)


def _arguments(kernel: str, slots: int, counts: bool) -> tuple[dict[str, str], dict[str, Any]]:
    control, counters, ids = {"control": "*i64"}, {"counts_E": "*i64"}, {"ids_TK": "*i64"}
    if kernel == "send_rows_kernel":
        sizes = dict.fromkeys(["rows", "bucket", "exchange"], "i32")
        places = dict.fromkeys(["stride_x", "section", "x_at", "ids_at", "weights_at", "E"], "i32:16")
        weights = {"weights_TK": "*fp32", "group_of_E": "*i32"}
        return {"x": "*bf16", **ids, **weights, **counters, **control, **sizes, **places}, WIDTHS
    if kernel == "take_rows_kernel":
        tensors = {"flags": "*i64", "ids_RK": "*i32", "taken_RK": "*i32", **counters, **control}
        sizes = dict.fromkeys(["blocks", "pairs", "exchange", "E"], "i32")
        return tensors | sizes, {"BLOCKS": 64, "BLOCK": 128 if counts else 4096, "COUNTS": counts, "TIMED": True}
    if kernel == "send_answers_kernel":
        sizes = {"bucket": "i32", "exchange": "i32", "section": "i32:16", "y_at": "i32:16", "E": "i32"}
        tensors = {"y": "*bf16", "taken_RK": "*i32", **counters, **control}
        return tensors | sizes, {**WIDTHS, "SLOTS": slots, "COUNTS": counts}
    if kernel == "wait_answers_kernel":
        sizes = {"blocks": "i32", "exchange": "i32", "section": "i32:16", "G": "i32"}
        return control | sizes, {"BLOCKS": 64, "TIMED": True}
    tensors = {**ids, "weights_TK": "*fp32", "group_of_E": "*i32", **control, "y": "*bf16"}
    sizes = {"rows": "i32", "exchange": "i32", "section": "i32:16", "y_at": "i32:16", "E": "i32", "G": "i32"}
    return tensors | sizes, {**WIDTHS, "SLOTS": slots, "WAITS": True, "TIMED": True}


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (1, 3), (K, 1)])
@pytest.mark.parametrize(("kernel", "counts"), WAITS + SENDS)
def test_nothing_spills(kernel: str, counts: bool, slots: int, rows: int) -> None:
    aot.assert_no_stack(compiled(kernel, slots, rows, counts=counts))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("kernel", "counts"), SENDS)
def test_a_flag_is_released_to_other_gpus_after_the_rows(kernel: str, counts: bool, rows: int) -> None:
    ptx = compiled(kernel, rows=rows, counts=counts).ptx
    flag = re.search(r"atom\.global\.sys\.release\.exch", ptx)
    assert flag is not None
    assert "st.global.v4" in ptx[: flag.start()]
    assert "bar.sync" in ptx[ptx.rindex("st.global.v4", 0, flag.start()) : flag.start()]


@pytest.mark.parametrize(("kernel", "counts"), WAITS)
def test_flags_are_acquired_from_other_gpus_and_lateness_is_looked_at(kernel: str, counts: bool) -> None:
    ptx = compiled(kernel, counts=counts).ptx
    assert re.search(r"(atom|ld)\.global\.sys\.acquire\.", ptx)
    assert "globaltimer" in ptx


@pytest.mark.parametrize("kernel", COUNTERS)
def test_a_kernel_that_does_not_count_has_no_code_for_it(kernel: str) -> None:
    assert "relaxed.add" not in compiled(kernel, counts=False).ptx
    assert "relaxed.add" in compiled(kernel, counts=True).ptx


def test_answers_are_counted_after_their_flag() -> None:
    ptx = compiled("send_answers_kernel", counts=True).ptx
    assert ptx.rindex("release.exch") < ptx.index("relaxed.add")
