"""The small-T kernels as machine code for an H200: which instructions they must be made of."""

from __future__ import annotations

import re

import pytest
from testkit import aot

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
    name = "small_down" if down else "small_in"
    return aot.compile_sm90(
        f"moe_kernels.{name}_triton:{name}_kernel", signature, constants, num_warps=num_warps, num_stages=num_stages,
        launch_pdl=True,
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


def check_resources(code: aot.Compiled) -> None:
    aot.assert_no_stack(code)
    aot.assert_no_i2f(code)
    aot.assert_smem_fits(code)
