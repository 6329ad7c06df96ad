"""Kernel of :mod:`moe_kernels.combine.op`. Legend: T rows, K slots, D hidden size."""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels import tiles as table
from moe_kernels.grouped_gemm.launch import device_name
from moe_kernels.overlap import overlaps


@triton.jit
def combine_kernel(
    out, place_TK, weights_TK, y, stride_out, stride_y, D,
    SLOTS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y[t, d] = sum over k of weights[t, k] out[place[t, k], d], slot 0 first, in float32. One program per row.

    Example: places ``[2, -1]``, weights ``[0.5, 3]``: y is half of row 2; the absent slot is not read.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(place_TK + row * SLOTS + slot)
        present = place >= 0
        source = out + place.to(tl.int64) * stride_out + columns
        part = tl.load(source, mask=present if EVEN else present & (columns < D), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            part *= tl.load(weights_TK + row * SLOTS + slot)
        # An absent slot's weight may be NaN or inf: choose, do not multiply by 0.
        total = tl.where(present, total + part, total)
    target = y + row.to(tl.int64) * stride_y + columns
    if EVEN:
        tl.store(target, total.to(y.dtype.element_ty))
    else:
        tl.store(target, total.to(y.dtype.element_ty), mask=columns < D)


def launch(out_SD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    assert place_TK.is_contiguous()
    assert weights_TK is None or weights_TK.is_contiguous()
    rows, slots = place_TK.shape
    hidden = out_SD.shape[1]
    name = device_name(out_SD.device)
    choice = table.tiles("combine", shape={"d": hidden, "k": slots}, rows=rows, dtype="any", device_name=name)
    block = min(choice["BLOCK_D"], triton.next_power_of_2(hidden))
    y_TD = out_SD.new_empty(rows, hidden)
    pdl = overlaps(out_SD.device)
    combine_kernel[(rows, triton.cdiv(hidden, block))](
        out_SD, place_TK, weights_TK, y_TD, out_SD.stride(0), y_TD.stride(0), hidden,
        SLOTS=slots, HAS_WEIGHTS=weights_TK is not None, EVEN=hidden % block == 0, PDL=pdl, BLOCK_D=block,
        num_warps=choice["num_warps"], launch_pdl=pdl,
    )  # fmt: skip
    return y_TD
