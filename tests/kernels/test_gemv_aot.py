"""What the compiler makes of the one-token kernels on sm_90: wide loads, no spills, no conversions, no exchanges."""

from __future__ import annotations

import re
from typing import Any

import pytest
from testkit.gpu import aot

KERNELS = {"in": "gemv_in_kernel", "down": "gemv_down_kernel"}


def compiled(
    launch: str, bits: int, group: int, *, n: int, warps: int, stages: int, slots: int = 2, **changes: Any
) -> aot.Compiled:
    """Whole tiles of a row: a chunk for each thread."""
    half = changes.pop("dtype", "fp32" if bits == 32 else "bf16")
    numbers = 128 // bits
    weight = f"*{half}" if bits >= 16 else "*i32"
    first = launch == "in"
    sizes = ["width" if first else "hidden", "depth", "stride_x" if first else "stride_h", "stride_e", "stride_o"]
    signature = {
        **dict.fromkeys(["x" if first else "h", "bias", "h" if first else "y"], f"*{half}"),
        "w": weight,
        "scales": weight if bits >= 16 else "*fp16",
        "ids": "*i32",
        "weights": "*fp32",
        **dict.fromkeys(sizes, "i32:16"),
        **dict.fromkeys(["experts", "scale_e", "scale_o", "stride_bias", "p16", "p256"], "i32"),
    }
    constants = {
        "SLOTS": slots,
        "HAS_BIAS": False,
        "WEIGH": not first,
        "BITS": bits,
        "GROUP_CHUNKS": group // numbers,
        "SCALE_STEP": 2 if group else 1,
        "MASK": 0 if first else 1,
        "STAGES": stages,
        "PDL": True,
        "N": n,
        "Q": 32 * warps,
        "V": max(4, numbers if bits >= 16 else 4),
        **({"ACT": "swiglu", "PARTS": 2} if first else {"J": slots}),
        **changes,
    }
    return aot.compile_sm90(f"moe_kernels.gemv.kernel:{KERNELS[launch]}", signature, constants, num_warps=warps)


def loads(kernel: aot.Compiled, width: int) -> int:
    return len(re.findall(rf"LDG\.E\.{width}\b", kernel.sass))


@pytest.mark.parametrize("launch", ["in", "down"])
@pytest.mark.parametrize(("bits", "group"), [(32, 0), (16, 0), (8, 0), (8, 128), (4, 0), (4, 128)])
def test_weights_come_in_chunks_and_nothing_spills(launch: str, bits: int, group: int) -> None:
    kernel = compiled(launch, bits, group, n=2, warps=1, stages=2)
    aot.assert_no_stack(kernel)
    # Two rows of two parts each, before the loop and in it.
    assert loads(kernel, 128) >= 8
    aot.assert_smem_fits(kernel)


@pytest.mark.parametrize("launch", ["in", "down"])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_codes_are_not_converted(launch: str, group: int, dtype: str) -> None:
    kernel = compiled(launch, 4, group, n=2, warps=1, stages=2, dtype=dtype)
    aot.assert_no_i2f(kernel)
    # A chunk is 32 codes: 4 of them per thread in the loop and 4 after it.
    products = 8 * 32
    assert products <= kernel.count("LOP3") < products * 1.2
    assert products <= kernel.count("FFMA") < products * 1.2


@pytest.mark.parametrize("launch", ["in", "down"])
@pytest.mark.parametrize(("bits", "group"), [(16, 0), (8, 128), (4, 0), (4, 128)])
def test_threads_exchange_only_sums(launch: str, bits: int, group: int) -> None:
    """One warp has no barrier; its sums go through shuffles. Layouts that differ would put tiles into shared memory."""
    kernel = compiled(launch, bits, group, n=2, warps=1, stages=2)
    assert kernel.count("BAR") == 0
    assert kernel.count("STS") + kernel.count("LDS") <= 8


@pytest.mark.parametrize("launch", ["in", "down"])
def test_deep_prefetch_is_asynchronous(launch: str) -> None:
    kernel = compiled(launch, 16, 0, n=4, warps=4, stages=4)
    assert "cp.async" in kernel.ptx
    aot.assert_no_stack(kernel)
    aot.assert_smem_fits(kernel)


def test_the_second_launch_asks_for_weights_before_it_waits() -> None:
    ptx = compiled("down", 4, 128, n=2, warps=1, stages=2).ptx
    wait = ptx.index("griddepcontrol.wait")
    assert "ld.global.v4" in ptx[:wait]
    assert "griddepcontrol" not in compiled("down", 4, 128, n=2, warps=1, stages=2, PDL=False).ptx


def test_the_first_launch_lets_the_second_begin_at_once() -> None:
    ptx = compiled("in", 4, 128, n=2, warps=1, stages=2).ptx
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.launch_dependents")]
