"""Kernel of :mod:`moe_kernels.add_rms_norm.op`: a program per row, which stays in registers from load to store.

Legend: T rows, D hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.overlap import overlaps


@triton.jit
def add_rms_norm_kernel(
    x, y, z, weight, total, out, eps, stride_x, stride_y, stride_z, D,
    HAS_Y: tl.constexpr, HAS_Z: tl.constexpr, PDL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """total = x + (y + z), each sum rounded; out = total x weight / sqrt(mean(total^2) + eps), in float32.

    Example: as in the op.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D
    dtype = x.dtype.element_ty
    weight_D = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    x_D = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        y_D = tl.load(y + row * stride_y + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_Z:
            z_D = tl.load(z + row * stride_z + columns, mask=inside, other=0.0).to(tl.float32)
            y_D = (y_D + z_D).to(dtype).to(tl.float32)
        x_D = (x_D + y_D).to(dtype).to(tl.float32)
        tl.store(total + row * D + columns, x_D.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(x_D * x_D, axis=0) / D + eps)
    tl.store(out + row * D + columns, (x_D * scale * weight_D).to(dtype), mask=inside)


def launch(
    x_TD: Tensor, y_TD: Tensor | None, z_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, hidden = x_TD.shape
    total_TD = x_TD if y_TD is None else torch.empty((rows, hidden), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty((rows, hidden), dtype=x_TD.dtype, device=x_TD.device)
    x, y, z = (_in_rows(x_TD if tensor is None else tensor) for tensor in (x_TD, y_TD, z_TD))
    block, pdl = triton.next_power_of_2(hidden), overlaps(x_TD.device)
    add_rms_norm_kernel[(rows,)](
        x, y, z, weight_D.contiguous(), total_TD, out_TD, float(eps), x.stride(0), y.stride(0), z.stride(0), hidden,
        HAS_Y=y_TD is not None, HAS_Z=z_TD is not None, PDL=pdl, BLOCK_D=block,
        num_warps=warps_for(block), launch_pdl=pdl,
    )  # fmt: skip
    return total_TD, out_TD


def warps_for(block: int) -> int:
    """So many that each thread has 8 elements, 16 bytes of a half type; a program has at most 16.

    >>> warps_for(64), warps_for(2048), warps_for(16_384)
    (1, 8, 16)
    """
    return max(1, min(block // 256, 16))


def _in_rows(tensor_TD: Tensor) -> Tensor:
    return tensor_TD if tensor_TD.stride(1) == 1 else tensor_TD.contiguous()
