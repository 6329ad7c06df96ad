"""The bench's own kernel, compiled for an H200: its two conversions must differ in what they are there to compare."""

from __future__ import annotations

import pytest
from testkit.gpu import aot


def compiled(bits: int, *, native: bool) -> aot.Compiled:
    pointer = "*fp16" if bits == 16 else "*u8"
    return aot.compile_sm90(
        "bench.suites.elephants_triton:convert_gemm_kernel",
        {"x": "*fp16", "w": pointer, "scales": "*fp16", "y": "*fp16", "R": "i32", "O": "i32:16", "I": "i32:16"},
        {"BITS": bits, "NATIVE": native, "STAGES": 4, "BLOCK_N": 64, "BLOCK_M": 16, "BLOCK_K": 128},
        num_warps=4,
        num_stages=4,
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_only_the_native_variant_converts_by_the_conversion_unit(bits: int) -> None:
    native, trick = compiled(bits, native=True), compiled(bits, native=False)
    assert native.count("I2F")
    aot.assert_no_i2f(trick)
    for found in (native, trick):
        aot.assert_wgmma(found)
        aot.assert_no_stack(found)
        aot.assert_smem_fits(found)
