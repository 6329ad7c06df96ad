"""What the compiler makes of joined calls' kernels on sm_90: flags other GPUs see in order, wide copies, no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from testkit.gpu import aot

D, K = 2048, 8
WIDTHS = {"D": D, "K": K, "BLOCK_K": K, "BLOCK_D": D}
WAITS = [(2, 1), (2, 8), (8, 256)]


def compiled(kernel: str, slots: int = 1, rows: int = 1) -> aot.Compiled:
    types, constants = _arguments(kernel, slots, rows)
    return aot.compile_sm90(f"moe_kernels.exchange.joined.kernel:{kernel}", types, constants)


def compiled_wait(members: int, blocks: int) -> aot.Compiled:
    types = {"control": "*i64", "exchange": "i32"}
    constants = {"M": members, "BLOCKS": blocks, "TIMED": True}
    return aot.compile_sm90("moe_kernels.exchange.joined.kernel:take_joined_kernel", types, constants)


def _arguments(kernel: str, slots: int, rows: int) -> tuple[dict[str, str], dict[str, Any]]:
    tile = {**WIDTHS, "TILE": triton.next_power_of_2(rows)}
    if kernel == "gather_joined_kernel":
        tensors = {"control": "*i64", "x_CD": "*bf16", "taken_CK": "*i32", "weights_CK": "*fp32"}
        places = dict.fromkeys(["x_at", "ids_at", "weights_at"], "i32:16")
        return {**tensors, "bucket": "i32", **places}, {**tile, "ROWS": rows}
    tensors = {"y": "*bf16", "taken_CK": "*i32", "counts_E": "*i64", "control": "*i64"}
    return {**tensors, "bucket": "i32", "exchange": "i32", "y_at": "i32:16", "E": "i32"}, {**tile, "SLOTS": slots}


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (1, 3), (K, 1)])
@pytest.mark.parametrize("kernel", ["gather_joined_kernel", "send_joined_kernel"])
def test_nothing_spills(kernel: str, slots: int, rows: int) -> None:
    aot.assert_no_stack(compiled(kernel, slots, rows))


@pytest.mark.parametrize(("members", "blocks"), WAITS)
def test_nothing_spills_while_flags_are_awaited(members: int, blocks: int) -> None:
    aot.assert_no_stack(compiled_wait(members, blocks))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_flag_is_released_to_other_gpus_after_the_rows_and_before_pairs_are_counted(rows: int) -> None:
    ptx = compiled("send_joined_kernel", rows=rows).ptx
    flag = re.search(r"atom\.global\.sys\.release\.exch", ptx)
    assert flag is not None
    assert "st.global.v4" in ptx[: flag.start()]
    assert "bar.sync" in ptx[ptx.rindex("st.global.v4", 0, flag.start()) : flag.start()]
    assert flag.start() < ptx.index("relaxed.add")


def test_rows_are_copied_wide_and_past_what_an_sm_has_cached() -> None:
    ptx = compiled("gather_joined_kernel").ptx
    assert "st.global.v4" in ptx
    assert re.search(r"ld\.global\S*\.cg\S*\.v4", ptx)


@pytest.mark.parametrize(("members", "blocks"), WAITS)
def test_flags_are_acquired_from_other_gpus_and_lateness_is_looked_at(members: int, blocks: int) -> None:
    ptx = compiled_wait(members, blocks).ptx
    assert re.search(r"(atom|ld)\.global\.sys\.acquire\.", ptx)
    assert "globaltimer" in ptx


@pytest.mark.parametrize(("members", "blocks"), WAITS)
def test_nothing_reads_flags_of_a_member_that_its_host_knows_is_out(members: int, blocks: int) -> None:
    """All threads have what they asked for before one writes it down."""
    ptx = compiled_wait(members, blocks).ptx
    read = [match.end() for match in re.finditer(r"sys\.acquire\.add", ptx)][-1]
    assert "st.global" not in ptx[:read]
    assert "bar.sync" in ptx[read : ptx.index("st.global", read)]
