"""The small-T kernels as machine code for an H200: which instructions they must be made of."""

from __future__ import annotations

import re

import pytest
from testkit.gpu import aot

NAMES = {"bf16": "bf16", "fp16": "f16"}
POINTERS = {"ids": "*i64", "local": "*i32", "keep": "*u8", "weights": "*fp32", "scales": "*fp16"}
LISTS = dict.fromkeys(("order_S", "first_C", "count_C", "total_1", "arrived_B"), "*i32")
FLAGS = {
    "SLOTS": 8, "BY_PAIR": True, "HAS_LOCAL": False, "HAS_KEEP": False, "HAS_BIAS": False, "EVEN_N": True,
    "EVEN_K": True, "EVICT_FIRST": False, "UPCAST": False, "PRECISION": "tf32", "PDL": True,
}  # fmt: skip


def matrix(dtype: str, bits: int, block_n: int, block_k: int, tma: bool) -> str:
    kind, columns = (dtype, block_k) if bits == 16 else ("i32", 16)
    return f"tensordesc<{kind}[{block_n},{columns}]>" if tma else f"*{kind}"


def compiled(
    down: bool, dtype: str = "bf16", bits: int = 16, *, tma: bool = True, block_m: int = 16, block_n: int = 64,
    block_k: int = 128, num_warps: int = 4, num_stages: int = 3, pairs: int = 64,
) -> aot.Compiled:  # fmt: skip
    signature = {
        "w": matrix(dtype, bits, block_n, block_k, tma), "h": f"*{dtype}", "bias": f"*{dtype}", "S": "i32",
        "IDS": "i32", "E": "i32", "F": "i32:16", "D": "i32:16", "G": "i32", "magic": "i32", **POINTERS, **LISTS,
    }  # fmt: skip
    constants = FLAGS | {
        "BITS": bits, "GROUP": 128 if bits < 16 else 0, "WORDS": bits < 16, "WARPS": num_warps, "TMA": tma,
        "STAGES": num_stages, "BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": block_k,
    }  # fmt: skip
    if down:
        signature |= {"parts": f"*{dtype}", "y": f"*{dtype}", "T": "i32", "DEPTH": "i32:16"}
        constants |= {"WEIGHTED": True, "COMBINE_IN_LAUNCH": True, "SPLIT_K": 1, "BLOCK_T": 8}
    else:
        signature |= {"x": f"*{dtype}", "stride_x": "i32:16", "COUNTERS": "i32"}
        constants |= {"ACT": "swiglu", "GATED": True, "SCALED": False, "H_ARRANGED": bits < 16, "LISTED": bits < 16}
        constants |= {"BLOCK_S": pairs, "BLOCK_C": 64}
    kernel = "down_kernel:small_down_kernel" if down else "in_kernel:small_in_kernel"
    return aot.compile_sm90(
        f"moe_kernels.small.{kernel}", signature, constants, num_warps=num_warps, num_stages=num_stages, launch_pdl=True
    )  # fmt: skip


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("tma", [False, True])
def test_half_types(tma: bool, down: bool) -> None:
    code = compiled(down, tma=tma, block_k=64, num_stages=4)
    aot.assert_wgmma(code)
    assert ("cp.async.bulk.tensor" in code.ptx) == tma
    check_resources(code)


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_unpacked_where_they_lie(bits: int, dtype: str, tma: bool, down: bool) -> None:
    code = compiled(down, dtype, bits, tma=tma, num_stages=4)
    aot.assert_wgmma_from_registers(code)
    if tma:
        # A thread unpacks what it read: no values go through shared memory, no bytes change places.
        assert not re.search(rf"local_alloc %.* : \(tensor<64x(64|128)x{NAMES[dtype]}", code.ttgir)
        assert code.count("PRMT") < 48
    check_resources(code)


@pytest.mark.parametrize("pairs", [64, 512, 2048])
def test_any_number_of_pairs_fits_the_registers(pairs: int) -> None:
    check_resources(compiled(False, pairs=pairs))


@pytest.mark.parametrize("bits", [16, 4])
def test_whoever_comes_last_sees_all_parts(bits: int) -> None:
    """No interpreter shows this: all threads store, one counts with release and acquire, all load past the L1."""
    ptx = compiled(True, bits=bits).ptx
    (count,) = re.finditer(r"atom\.\S+", ptx)
    assert count[0] == "atom.global.gpu.acq_rel.add.u32"
    before, after = ptx[: count.start()], ptx[count.start() :]
    # Barriers in the basic block that counts: every thread passes them, whatever loop it comes from.
    assert "bar.sync" in before[before.rindex("$L__BB") :]
    assert "bar.sync" in after[: after.index("$L__BB")]
    assert "st.global" in before
    assert "ld.global.cg" not in before
    assert "ld.global.cg" in after


@pytest.mark.parametrize("down", [False, True])
def test_nothing_is_touched_before_the_wait(down: bool) -> None:
    ptx = compiled(down).ptx
    assert not re.search(r"\b(ld|st|atom)\.global|cp\.async", ptx[: ptx.index("griddepcontrol.wait")])


@pytest.mark.parametrize("pairs", [64, 2048])
def test_lists_and_the_sum_in_launches_of_their_own(pairs: int) -> None:
    sizes = dict.fromkeys(("T", "C", "S", "IDS", "E", "COUNTERS"), "i32")
    choice = {name: POINTERS[name] for name in ("ids", "local", "keep")}
    shared = {"SLOTS": 8, "HAS_LOCAL": True, "HAS_KEEP": True, "PDL": True}
    lists = aot.compile_sm90(
        "moe_kernels.small.in_kernel:small_lists_kernel",
        {"x": "*bf16", "out": "*bf16", "stride_x": "i32:16", "D": "i32:16", **LISTS, **choice, **sizes},
        shared | {"BY_PAIR": pairs <= 512, "ARRANGE": True, "BLOCK_S": pairs, "BLOCK_C": 64, "BLOCK_D": 1024},
        launch_pdl=True,
    )
    total = aot.compile_sm90(
        "moe_kernels.small.down_kernel:small_combine_kernel",
        {"parts": "*bf16", "y": "*bf16", "D": "i32:16", "weights": "*fp32", **choice}
        | {name: sizes[name] for name in ("T", "S", "IDS", "E")},
        shared | {"WEIGHTED": True, "SPLIT_K": 4, "BLOCK_T": 1, "BLOCK_N": 256},
        num_warps=2,
        launch_pdl=True,
    )
    for code in (lists, total):
        check_resources(code)


def check_resources(code: aot.Compiled) -> None:
    aot.assert_no_stack(code)
    aot.assert_no_i2f(code)
    aot.assert_smem_fits(code)
