"""What the compiler makes of decode attention on sm_90: tensor cores, wide asynchronous copies, no spills."""

from __future__ import annotations

import pytest
from testkit.gpu import aot

from moe_kernels.paged_decode.kernel import cut, tiles_for

SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
DTYPES = {"fp16": "tl.float16", "bf16": "tl.bfloat16", "fp32": "tl.float32"}


def compiled(dtype: str, group: int, head_dim: int, block_size: int = 16) -> aot.Compiled:
    block_h = max(16, 1 << (head_dim - 1).bit_length())
    tiles = tiles_for(block_h, SIZES[dtype])
    tensors = dict.fromkeys(["q", "k", "v", "out"], f"*{dtype}") | {"sums": "*fp32", "logs": "*fp32"}
    sizes = dict.fromkeys(["window", "wanted", "stride_m", "J"], "i32")
    strides = {"stride_s": "i32:16", "stride_n": "i32:16" if head_dim % 16 == 0 else "i32"}
    return aot.compile_sm90(
        "moe_kernels.paged_decode.kernel:paged_decode_kernel",
        {**tensors, "blocks_SM": "*i32", "kv_len_S": "*i32", "scale": "fp32", **sizes, **strides},
        {
            "G": group, "H": head_dim, "B": block_size, "BLOCK_G": max(16, 1 << (group - 1).bit_length()),
            "BLOCK_H": block_h, "BLOCK_L": tiles.pop("BLOCK_L"), "DTYPE": DTYPES[dtype],
        },
        **tiles,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("group", "head_dim"), [(8, 128), (1, 64), (4, 96), (32, 256), (2, 32)])
def test_nothing_spills_and_it_fits(dtype: str, group: int, head_dim: int) -> None:
    code = compiled(dtype, group, head_dim)
    aot.assert_smem_fits(code)
    aot.assert_no_stack(code)


@pytest.mark.parametrize("block_size", [16, 5])
def test_products_on_tensor_cores_and_copies_of_16_bytes(block_size: int) -> None:
    code = compiled("bf16", 8, 128, block_size)
    assert code.count("HMMA")
    assert "LDGSTS.E.BYPASS.128" in code.sass


def test_the_sum_of_parts_reads_wide() -> None:
    code = aot.compile_sm90(
        "moe_kernels.paged_decode.kernel:sum_parts_kernel",
        {"sums": "*fp32", "logs": "*fp32", "kv_len_S": "*i32", "out": "*bf16"}
        | dict.fromkeys(["window", "wanted", "parts", "N"], "i32"),
        {"H": 128, "BLOCK_H": 128, "BLOCK_P": 64, "TILE": 8},
        num_warps=2,
    )
    aot.assert_no_stack(code)
    assert code.count("LDG.E.128")


@pytest.mark.parametrize(("programs", "most"), [(1, 1), (4, 40_960), (32, 40_960), (1024, 40_960), (8, 300)])
def test_every_length_has_room_in_the_grid(programs: int, most: int) -> None:
    wanted, parts = cut(programs, most, 132)
    assert 1 <= wanted <= parts <= 64
    assert programs * wanted >= min(4 * 132, programs * parts) or wanted == -(-most // 128)
