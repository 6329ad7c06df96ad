"""The large-T kernels as machine code for an H200."""

from __future__ import annotations

import pytest
from testkit.gpu import aot

from moe_kernels.fitting import fitted

INTEGERS = dict.fromkeys(("stride_x", "stride_o", "stride_out", "stride_bias", "O", "I", "WIDTH"), "i32:16")
LISTS = dict.fromkeys(("order_S", "ends_E", "tile_expert_M", "tile_row_M", "tile_count_1"), "*i32")
FLAGS = {
    "SLOTS": 8, "SCATTER": False, "HAS_BIAS": False, "HAS_SCALE": False, "EVEN": True, "UPCAST": False,
    "PRECISION": "tf32", "PDL": True, "GROUP_M": 8,
}  # fmt: skip


def grouped(
    *, gated: bool = False, gather: str = "grouped", transpose: bool = False, tma: bool = True,
    activation: str = "identity", block_m: int = 128, block_n: int = 256, num_warps: int = 8, stages: int = 4,
    programs: int = 132, dtype: str = "bf16", block_k: int = 64,
) -> aot.Compiled:  # fmt: skip
    box = (block_k, block_n) if transpose else (1, 2, block_n, block_k) if gated else (block_n, block_k)
    sides = ",".join(map(str, box))
    x_tma = tma and gather == "grouped"
    signature = {
        "x": f"tensordesc<{dtype}[{block_m},{block_k}]>" if x_tma else f"*{dtype}",
        "w": f"tensordesc<{dtype}[{sides}]>" if tma else f"*{dtype}",
        "out": f"*{dtype}", "bias": f"*{dtype}", "row_scale": "*fp32", "stride_e": "i64:16", "COLUMN_TILES": "i32",
        **LISTS, **INTEGERS,
    }  # fmt: skip
    constants = FLAGS | {
        "GATHER": gather, "ACT": activation, "GATED": gated, "TRANSPOSE": transpose, "X_TMA": x_tma, "W_TMA": tma,
        "STAGES": stages, "PROGRAMS": programs, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    return aot.compile_sm90(
        "moe_kernels.grouped_gemm.kernel:grouped_gemm_kernel", signature, constants, num_warps=num_warps,
        num_stages=stages, launch_pdl=True,
    )  # fmt: skip


def swapped(*, bits: int, block_m: int, block_n: int = 64, gated: bool = True, dtype: str = "bf16") -> aot.Compiled:
    kind, columns = (dtype, 64) if bits == 16 else ("i32", 16)
    signature = {
        "x": f"*{dtype}", "w": f"tensordesc<{kind}[{block_n},{columns}]>", "out": f"*{dtype}", "scales": "*fp16",
        "bias": f"*{dtype}", "row_scale": "*fp32", "stride_x": "i32:16", "stride_out": "i32:16",
        "stride_bias": "i32:16", "I": "i32:16", "G": "i32", "WIDTH": "i32:16", "magic": "i32", **LISTS,
    }  # fmt: skip
    constants = {
        "SLOTS": 8, "GATHER": "token" if gated else "grouped", "ACT": "swiglu" if gated else "identity", "GATED": gated,
        "HAS_BIAS": False, "HAS_SCALE": False, "OUT_ARRANGED": bits < 16, "BITS": bits,
        "GROUP": 128 if bits < 16 else 0, "WORDS": bits < 16, "WARPS": 4, "TMA": True, "EVEN_N": True, "EVEN_K": True,
        "EVICT_FIRST": False, "UPCAST": False, "PRECISION": "tf32", "PDL": True, "STAGES": 3, "GROUP_M": 8,
        "BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": 128 if bits < 16 else 64,
    }  # fmt: skip
    return aot.compile_sm90(
        "moe_kernels.grouped_gemm.swapped.kernel:swapped_gemm_kernel", signature, constants, num_warps=4, num_stages=3,
        launch_pdl=True,
    )  # fmt: skip


def check_resources(code: aot.Compiled) -> None:
    aot.assert_no_stack(code)
    aot.assert_smem_fits(code)


@pytest.mark.parametrize("gather", ["token", "grouped"])
@pytest.mark.parametrize("programs", [0, 132])
def test_gate_and_up_are_one_instruction_of_full_width(programs: int, gather: str) -> None:
    code = grouped(gated=True, activation="swiglu", gather=gather, block_n=128, programs=programs)
    aot.assert_wgmma(code)
    aot.assert_tma(code)
    assert "HGMMA.64x256x16" in code.sass
    check_resources(code)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_grouped_rows(dtype: str, transpose: bool) -> None:
    code = grouped(transpose=transpose, dtype=dtype)
    aot.assert_wgmma(code)
    aot.assert_tma(code)
    check_resources(code)


def test_gathered_rows_of_a_plain_mlp() -> None:
    code = grouped(gather="token", activation="gelu", stages=3, programs=0)
    aot.assert_wgmma(code)
    check_resources(code)


@pytest.mark.parametrize("activation", ["identity", "swiglu"])
def test_without_tma(activation: str) -> None:
    gated = activation == "swiglu"
    code = grouped(tma=False, gather="pair", gated=gated, activation=activation, block_n=128, stages=3, programs=0)
    aot.assert_wgmma(code)
    check_resources(code)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("block_m", [16, 64])
def test_swapped_half_types(block_m: int, gated: bool) -> None:
    code = swapped(bits=16, block_m=block_m, gated=gated)
    aot.assert_wgmma(code)
    aot.assert_tma(code)
    check_resources(code)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_swapped_quantised_weights_stay_in_registers(bits: int, block_m: int, dtype: str) -> None:
    code = swapped(bits=bits, block_m=block_m, dtype=dtype)
    aot.assert_wgmma_from_registers(code)
    aot.assert_no_i2f(code)
    check_resources(code)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dequantize_has_no_integer_conversion(dtype: str, bits: int) -> None:
    pointer = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
    signature = {"packed": "*u8", "scales": "*fp16", "out": pointer, "R": "i32:16", "I": "i32:16", "G": "i32:16"}
    constants = {"BITS": bits, "GROUP": 128, "DTYPE": f"tl.{dtype}", "BLOCK_R": 16, "BLOCK_B": 256}
    code = aot.compile_sm90("moe_kernels.quant.kernel:dequantize_kernel", signature, constants)
    aot.assert_no_i2f(code)
    check_resources(code)


@pytest.mark.parametrize("scatter", [False, True])
def test_clearing_absent_rows(scatter: bool) -> None:
    signature = {"out": "*bf16", "order_S": "*i32", "ends_E": "*i32", "pairs": "i32", "WIDTH": "i32:16"}
    constants = {"LAST": 127, "SCATTER": scatter, "ROWS": 32, "BLOCK": 1024}
    code = aot.compile_sm90("moe_kernels.grouped_gemm.kernel:clear_absent_kernel", signature, constants)
    check_resources(code)
    assert "st.global.v4" in code.ptx


def test_arranging_columns() -> None:
    signature = {"x": "*bf16", "out": "*bf16", "stride_x": "i32:16", "D": "i32:16"}
    code = aot.compile_sm90("moe_kernels.grouped_gemm.swapped.kernel:arrange_kernel", signature, {"BLOCK": 1024})
    check_resources(code)


@pytest.mark.parametrize("experts", [8, 512])
def test_experts_of_grouped_rows(experts: int) -> None:
    signature = {"counts_E": "*i64", "ids_N": "*i32", "ones_N": "*fp32", "rows": "i32", "E": "i32"}
    constants = {"BLOCK_E": experts, "BLOCK": 128}
    code = aot.compile_sm90("moe_kernels.experts.kernel:expert_of_row_kernel", signature, constants)
    check_resources(code)


def test_combine() -> None:
    signature = {
        "out": "*bf16", "place_TK": "*i32", "weights_TK": "*fp32", "y": "*bf16", "stride_out": "i32:16",
        "stride_y": "i32:16", "D": "i32:16",
    }  # fmt: skip
    constants = {"SLOTS": 8, "HAS_WEIGHTS": True, "EVEN": True, "PDL": True, "BLOCK_D": 1024}
    code = aot.compile_sm90("moe_kernels.combine.kernel:combine_kernel", signature, constants, launch_pdl=True)
    check_resources(code)
    assert "ld.global.v4" in code.ptx


@pytest.mark.parametrize("programs", [0, 132])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("block_n", "block_k", "warps", "stages"), [(256, 64, 8, 4), (128, 128, 4, 3), (128, 128, 8, 3), (64, 128, 4, 3)]
)
def test_tiles_of_another_call_are_made_to_fit(
    block_n: int, block_k: int, warps: int, stages: int, gated: bool, programs: int
) -> None:
    tiles = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}
    found = fitted(tiles, block_m=128, matrices=1 + gated, weight_bytes=2, row_bytes=2, limit=aot.SMEM_BYTES)
    code = grouped(
        gated=gated, gather="token", activation="swiglu" if gated else "identity", block_n=found["BLOCK_N"],
        block_k=found["BLOCK_K"], num_warps=warps, stages=found["num_stages"], programs=programs,
    )  # fmt: skip
    aot.assert_smem_fits(code)
