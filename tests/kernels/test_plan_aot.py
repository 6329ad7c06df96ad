"""Machine code of plan's kernels for an H200: no stack, no atomics but the histogram's, early launch."""

from __future__ import annotations

import re
from typing import Any

import pytest
from testkit.gpu import aot

SIZES = {"rows": "i32", "known": "i32", "M": "i32", "capacity": "i32", "blocks": "i32", "placing": "i32"}
FLAGS = {
    "E": 128, "X": 128, "SLOTS": 8, "BLOCK_ROWS": 128, "SLOT_FIRST": False, "HAS_TABLE": True, "HAS_KEEP": True,
    "LIMIT": False, "LIMITED": False, "PAD": 256, "PDL": True,
}  # fmt: skip


def compiled(kernel: str, pointers: str, sizes: str, flags: str, warps: int, **constants: Any) -> aot.Compiled:
    special = {"ids": "*i64", "keep": "*u8"}
    signature = {name: special.get(name, "*i32") for name in pointers.split()}
    signature |= {name: SIZES[name] for name in sizes.split()}
    constexprs = {name: FLAGS[name] for name in flags.split()} | {"PDL": True} | constants
    return aot.compile_sm90(f"moe_kernels.plan.kernel:{kernel}", signature, constexprs, num_warps=warps)


@pytest.mark.parametrize(("block", "warps"), [(128, 4), (1024, 8), (4096, 8)])
@pytest.mark.parametrize("one_block", [True, False])
def test_machine_code_of_the_one_launch(block: int, warps: int, one_block: bool) -> None:
    code = compiled(
        "small_kernel",
        "ids table keep order place ends tile_expert tile_row tile_count dropped served_before limited",
        "rows M known capacity",
        "E X SLOTS BLOCK_ROWS SLOT_FIRST HAS_TABLE HAS_KEEP LIMIT LIMITED PAD",
        warps,
        B=block,
        ONE_BLOCK=one_block,
        EARLY=False,
    )
    aot.assert_no_stack(code)
    # The histogram's counters; their sum does not depend on the order.
    assert set(re.findall(r"\b(?:atom|red)\.\S+", code.ptx)) <= {"atom.shared.add.u32"}
    assert "griddepcontrol.wait" in code.ptx


def test_machine_code_of_the_three_launches() -> None:
    count = compiled(
        "count_kernel", "ids table keep ranked lower", "rows known", "E X SLOTS SLOT_FIRST HAS_TABLE HAS_KEEP", 4,
        B=128,
    )  # fmt: skip
    scan = compiled(
        "scan_kernel", "lower starts ends dropped served_before", "blocks", "E LIMIT LIMITED", 4, C=512, W=8
    )
    place = compiled(
        "place_kernel", "ranked starts ends order place tile_expert tile_row tile_count limited",
        "rows M capacity placing", "E X SLOTS BLOCK_ROWS SLOT_FIRST LIMIT PAD", 4, B=128, N=512,
    )  # fmt: skip
    for code in (count, scan, place):
        aot.assert_no_stack(code)
        aot.assert_smem_fits(code)
