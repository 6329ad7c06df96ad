"""From tensors to a launch of :mod:`moe_kernels.grouped_gemm.kernel`: which loads, which tiles, how many programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels import backend
from moe_kernels import tiles as table
from moe_kernels.activations.op import Activation, gated
from moe_kernels.fitting import HOPPER_BYTES, fitted
from moe_kernels.grouped_gemm.kernel import clear_absent_kernel, grouped_gemm_kernel
from moe_kernels.overlap import overlaps
from moe_kernels.plan.types import Plan

TMA_BYTES = 16
"""TMA needs rows and the first element at multiples of this."""
_CLEAR_ROWS = 32
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def launch(
    x_NI: Tensor,
    w_EOI: Tensor,
    plan: Plan,
    gather: str | None,
    scatter: bool,
    activation: Activation,
    bias_EO: Tensor | None,
    row_scale_S: Tensor | None,
    transpose_w: bool,
    tiles: Mapping[str, int] | None = None,
    clear: bool = True,
    first_expert: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`moe_kernels.grouped_gemm.op.grouped_gemm` by kernel.

    Args:
        clear: write zeros to the rows that no expert takes; callers that never read those save the launch.
        first_expert: of the plan's experts, the one whose matrix ``w_EOI`` begins with. Rows of experts that it does
            not hold are left as they are in ``out``.
    """
    assert bias_EO is None or bias_EO.is_contiguous()
    assert row_scale_S is None or row_scale_S.is_contiguous()
    is_gated = gated(activation)
    experts, stored_rows, stored_columns = w_EOI.shape
    depth, columns = (stored_rows, stored_columns) if transpose_w else (stored_columns, stored_rows)
    width = columns // 2 if is_gated else columns
    pairs = plan.order_S.numel()
    op = "large.in" if gather == "token" else "large.down"
    choice = fitted(
        tiles or tiles_for(op, x_NI, experts, depth, width, pairs, is_gated),
        block_m=plan.block_rows, matrices=1 + is_gated, weight_bytes=w_EOI.element_size(),
        row_bytes=x_NI.element_size(), limit=shared_memory(x_NI.device),
    )  # fmt: skip
    block_m, block_n, block_k = plan.block_rows, choice["BLOCK_N"], choice["BLOCK_K"]
    out_SW = x_NI.new_empty(pairs, width) if out is None else out
    part = experts < plan.ends_E.numel()
    x_tma = gather is None and _tma_takes(x_NI)
    w_tma = _tma_takes(w_EOI) and w_EOI.is_contiguous()
    x_argument, w_argument = x_NI, w_EOI
    if x_tma:
        x_argument = TensorDescriptor(x_NI, list(x_NI.shape), [x_NI.stride(0), 1], [block_m, block_k])
    if w_tma:
        w_argument = _weight_descriptor(w_EOI, is_gated, transpose_w, block_n, block_k)
    column_tiles = triton.cdiv(width, block_n)
    pdl = overlaps(x_NI.device)
    programs = 0 if part else choice["PERSIST"] * _multiprocessors(x_NI.device)
    grid = programs or plan.tile_expert_M.numel() * column_tiles
    grouped_gemm_kernel[(grid,)](
        x_argument, w_argument, out_SW, plan.order_S, plan.ends_E, plan.tile_expert_M, plan.tile_row_M,
        plan.tile_count_1, bias_EO, row_scale_S,
        x_NI.stride(0), w_EOI.stride(0), w_EOI.stride(1), out_SW.stride(0), 0 if bias_EO is None else bias_EO.stride(0),
        stored_rows, stored_columns, width, column_tiles, first_expert, experts,
        SLOTS=plan.slots, GATHER=gather or "grouped", SCATTER=scatter, ACT=activation, GATED=is_gated,
        HAS_BIAS=bias_EO is not None, HAS_SCALE=row_scale_S is not None, TRANSPOSE=transpose_w,
        X_TMA=x_tma, W_TMA=w_tma, PART=part,
        # TMA fills what lies past the ends of x with zeros; pointer loads need masks there.
        EVEN=depth % block_k == 0 and (w_tma or width % block_n == 0),
        UPCAST=backend.upcast(x_NI.dtype), PRECISION="ieee" if x_NI.dtype == torch.float32 else "tf32",
        STAGES=choice["num_stages"], PROGRAMS=programs, PDL=pdl, GROUP_M=choice["GROUP_M"],
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=choice["num_warps"], num_stages=choice["num_stages"], launch_pdl=pdl,
    )  # fmt: skip
    if clear:
        block = min(1024, triton.next_power_of_2(width))
        clear_absent_kernel[(triton.cdiv(pairs, _CLEAR_ROWS),)](
            out_SW, plan.order_S, plan.ends_E, pairs, width,
            LAST=experts - 1, SCATTER=scatter, ROWS=_CLEAR_ROWS, BLOCK=block,
        )  # fmt: skip
    return out_SW


def _weight_descriptor(
    w_EOI: Tensor, is_gated: bool, transpose_w: bool, block_n: int, block_k: int
) -> TensorDescriptor:
    """Boxes of ``[BLOCK_N, BLOCK_K]`` (transposed: the other way round) over all experts' rows; for gated experts of
    BLOCK_N gate rows and the BLOCK_N up rows that belong to them."""
    experts, rows, columns = w_EOI.shape
    if is_gated:
        half = rows // 2
        strides = [rows * columns, half * columns, columns, 1]
        view = w_EOI.view(experts, 2, half, columns)
        return TensorDescriptor(view, [experts, 2, half, columns], strides, [1, 2, block_n, block_k])
    box = [block_k, block_n] if transpose_w else [block_n, block_k]
    return TensorDescriptor(w_EOI.view(experts * rows, columns), [experts * rows, columns], [columns, 1], box)


def tiles_for(
    op: str, x: Tensor, experts: int, depth: int, width: int, pairs: int, is_gated: bool
) -> Mapping[str, int]:
    """Tiles for ``pairs`` rows spread over ``experts`` matrices of ``[width, depth]``, two of them if gated."""
    shape = {"depth": depth, "width": width, "E": experts, "gated": 1 + is_gated}
    return table.tiles(op, shape=shape, rows=pairs, dtype=DTYPE_NAMES[x.dtype], device_name=device_name(x.device))


@cache
def device_name(device: torch.device) -> str | None:
    """The GPU's name, under which its tiles are filed; None elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use; an H200's where kernels are interpreted."""
    if device.type != "cuda":
        return HOPPER_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _tma_takes(tensor: Tensor) -> bool:
    """Rows contiguous, strides and address aligned. float32 products gain nothing from it."""
    row_bytes = tensor.stride(-2) * tensor.element_size()
    aligned = row_bytes % TMA_BYTES == 0 and tensor.data_ptr() % TMA_BYTES == 0
    return aligned and tensor.stride(-1) == 1 and tensor.numel() > 0


@cache
def _multiprocessors(device: torch.device) -> int:
    """1 where kernels are interpreted, so that a persistent program walks more than one tile."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
