"""The ahead-of-time compiler of the tests, on kernels whose machine code is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from testkit.gpu import aot
from testkit.gpu.probe_triton import product
from triton.tools.tensor_descriptor import TensorDescriptor


def compiled_product(block_m: int = 128, *, double: bool = False, **options: Any) -> aot.Compiled:
    return aot.compile_sm90(
        "testkit.gpu.probe_triton:product",
        {
            "a_desc": f"tensordesc<bf16[{block_m},64]>",
            "b_desc": "tensordesc<bf16[128,64]>",
            "c": "*bf16",
            "O": "i32:16",
            "I": "i32:16",
        },
        {
            "BLOCK_M": block_m,
            "BLOCK_N": 128,
            "BLOCK_K": 64,
            "DTYPE": "tl.bfloat16",
            "UPCAST": False,
            "DOUBLE": double,
        },
        **options,
    )


def compiled_convert(pointer: str) -> aot.Compiled:
    return aot.compile_sm90("testkit.gpu.probe_triton:convert", {"x": pointer, "y": "*fp32"}, {"BLOCK": 1024})


def compiled_crowded() -> aot.Compiled:
    return aot.compile_sm90(
        "testkit.gpu.probe_triton:crowded", {"x": "*fp32", "y": "*fp32"}, {"BLOCK": 64}, num_warps=1, maxnreg=32
    )


def test_a_good_kernel_passes_every_assertion() -> None:
    good = compiled_product(num_warps=8)
    for check in (aot.assert_wgmma, aot.assert_no_stack, aot.assert_no_i2f, aot.assert_smem_fits):
        check(good)
    assert 0 < good.registers <= 255
    aot.assert_wgmma_from_registers(compiled_product(double=True))


@pytest.mark.parametrize(
    ("compiled", "check", "words"),
    [
        (lambda: compiled_product(16), aot.assert_wgmma, "no wgmma"),
        (compiled_product, aot.assert_wgmma_from_registers, "both from shared memory"),
        (lambda: compiled_product(num_stages=8), aot.assert_smem_fits, "bytes of shared memory"),
        (lambda: compiled_convert("*i32"), aot.assert_no_i2f, "I2F in the SASS"),
        (compiled_crowded, aot.assert_no_stack, "of stack"),
    ],
)
def test_each_assertion_can_fail(
    compiled: Callable[[], aot.Compiled], check: Callable[[aot.Compiled], None], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        check(compiled())


def test_alignment_widens_the_loads() -> None:
    assert compiled_convert("*i32").count("LDG.E.128")
    assert not compiled_convert("*i32:1").count("LDG.E.128")


def test_a_refused_kernel_names_the_reason() -> None:
    with pytest.raises(aot.CompileError, match="in neither or both"):
        aot.compile_sm90("testkit.gpu.probe_triton:convert", {"x": "*i32"}, {"BLOCK": 1024})
    with pytest.raises(aot.CompileError, match="power of 2"):
        aot.compile_sm90("testkit.gpu.probe_triton:convert", {"x": "*i32", "y": "*fp32"}, {"BLOCK": 1000})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_this_process_interprets(dtype: torch.dtype) -> None:
    """The kernel that was compiled above, run on a CPU with host-made descriptors."""
    from moe_kernels import backend

    a, b = (torch.randint(-4, 5, (32, 32), generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    c = torch.full((32, 32), torch.nan, dtype=dtype)
    descriptors = [TensorDescriptor.from_tensor(tensor, [16, 16]) for tensor in (a, b)]
    product[(2, 2)](
        *descriptors, c, 32, 32, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, DTYPE=_tl(dtype),
        UPCAST=backend.upcast(dtype), DOUBLE=False,
    )  # fmt: skip
    assert torch.equal(c, (a.float() @ b.float().T).to(dtype))


def _tl(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
