"""The expert ops by kernel: which of the regimes a call takes, and the launches of the large one.

Legend: T rows, D hidden size, E experts, F expert width, K slots, S = T x K pairs, N rows that lie grouped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels import tiles as table
from moe_kernels.activations.op import Activation
from moe_kernels.backend import packed
from moe_kernels.combine.kernel import launch as combine
from moe_kernels.experts.rounded_rows import launch as rounded_rows
from moe_kernels.gemv.kernel import gemv_moe
from moe_kernels.grouped_gemm import launch as gemm
from moe_kernels.grouped_gemm.swapped import launch as swapped
from moe_kernels.plan.op import plan as make_plan
from moe_kernels.plan.types import Plan
from moe_kernels.quant.op import dequantize_experts
from moe_kernels.quant.weight import QuantisedWeight, Weight
from moe_kernels.small.kernel import MAX_PAIRS, small_moe

_IDS_BLOCK = 128
UNPACKED_BYTES = 256 * 2**20
"""What a large product may keep of quantised weights as numbers: an expert of Mixtral's first matrix has 224 MiB."""
ALIGNMENT = 16
"""Bytes."""


def fused_moe(
    x_TD: Tensor,
    w_in: Weight,
    w_down: Weight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation,
    bias_in: Tensor | None,
    bias_down: Tensor | None,
    weights_on: Literal["output", "input"],
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
) -> Tensor:
    """:func:`moe_kernels.fused_moe`, its arguments checked; at least one row."""
    x_TD = aligned_rows(x_TD)
    ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
    bias_in, bias_down, keep_T, local_E = (packed(tensor) for tensor in (bias_in, bias_down, keep_T, local_E))
    rows, slots = ids_TK.shape
    shape = shape_of(w_in, w_down, slots)
    kind = dtype_of(w_in, x_TD)
    if rounded_rows.takes(w_in) and rounded_rows.takes(w_down):
        # Tables are of rows in half types: what serves in float32 wants its numbers.
        rounds = "fp32" if x_TD.dtype == torch.float32 else kind
        from_rows = lookup("rounded_rows", shape, rows, rounds, x_TD)["FROM_ROWS"]
        if 0 < from_rows <= rows:
            return _rounded(
                x_TD, w_in, w_down, ids_TK, weights_TK, activation, bias_in, bias_down, weights_on == "input", keep_T,
                local_E, plan, shape, kind,
            )  # fmt: skip
    regimes = lookup("fused_moe", shape, rows, kind, x_TD)
    if plan is None and keep_T is None and local_E is None and rows <= regimes["GEMV_ROWS"]:
        return gemv_moe(
            x_TD, w_in, w_down, ids_TK, weights_TK, activation=activation, bias_in=bias_in, bias_down=bias_down,
            weights_on=weights_on, tiles=lookup("gemv", shape, rows, kind, x_TD),
        )  # fmt: skip
    if plan is None and rows <= regimes["SMALL_ROWS"] and rows * slots <= MAX_PAIRS:
        return small_moe(
            x_TD, w_in, w_down, ids_TK, weights_TK, activation=activation, bias_in=bias_in, bias_down=bias_down,
            weights_on=weights_on, keep_T=keep_T, local_E=local_E,
            tiles_in=lookup("small.in", shape, rows, kind, x_TD),
            tiles_down=lookup("small.down", shape, rows, kind, x_TD),
        )  # fmt: skip
    return _large(
        x_TD, w_in, w_down, ids_TK, weights_TK, activation, bias_in, bias_down, weights_on == "input", keep_T, local_E,
        plan, shape, kind,
    )  # fmt: skip


def _large(
    x_TD: Tensor,
    w_in: Weight,
    w_down: Weight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation,
    bias_in: Tensor | None,
    bias_down: Tensor | None,
    weigh_input: bool,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
    shape: Mapping[str, int],
    kind: str,
) -> Tensor:
    """Plan, two grouped products, combine. Rows of h and out that no expert takes are neither written nor read."""
    rows, slots = ids_TK.shape
    tiles_in = lookup("large.in", shape, rows, kind, x_TD)
    tiles_down = lookup("large.down", shape, rows, kind, x_TD)
    block_rows = tiles_in["BLOCK_M"] if plan is None else plan.block_rows
    if tiles_in["SWAP"]:
        tiles_in = swapped.tiles_for_rows(tiles_in, x_TD, w_in, activation, block_rows)
        swapped.check_bands(rows * slots, shape["E"], tiles_in)
    if tiles_down["SWAP"]:
        tiles_down = swapped.tiles_for_rows(tiles_down, x_TD, w_down, "identity", block_rows)
        swapped.check_bands(rows * slots, shape["E"], tiles_down)
    if plan is None:
        plan = make_plan(ids_TK, shape["E"], block_rows=block_rows, keep_T=keep_T, local_E=local_E)
    scale_S = weights_TK.view(-1) if weigh_input else None
    h_arranged = bool(tiles_down["SWAP"]) and swapped.wants_arranged(x_TD, w_down, tiles_down)
    if tiles_in["SWAP"]:
        x_in = swapped.arrange(x_TD, w_in, tiles_in)
        h_SF = swapped.launch(
            x_in, w_in, plan, "token", activation, bias_in, scale_S, tiles_in, out_arranged=h_arranged
        )
    else:
        h_SF = _unpacked(x_TD, w_in, plan, "token", activation, bias_in, scale_S, tiles_in)
    if tiles_down["SWAP"]:
        out_SD = swapped.launch(h_SF, w_down, plan, None, "identity", bias_down, None, tiles_down)
    else:
        out_SD = _unpacked(h_SF, w_down, plan, None, "identity", bias_down, None, tiles_down)
    return combine(out_SD, plan.place_S.view(rows, slots), None if weigh_input else weights_TK)


def _rounded(
    x_TD: Tensor,
    w_in: QuantisedWeight,
    w_down: QuantisedWeight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation,
    bias_in: Tensor | None,
    bias_down: Tensor | None,
    weigh_input: bool,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
    shape: Mapping[str, int],
    kind: str,
) -> Tensor:
    """:func:`_large` with rows rounded to FP8 before each product."""
    rows, slots = ids_TK.shape
    tiles_in = lookup("rounded.in", shape, rows, kind, x_TD)
    tiles_down = lookup("rounded.down", shape, rows, kind, x_TD)
    if plan is None:
        plan = make_plan(ids_TK, shape["E"], block_rows=tiles_in["BLOCK_M"], keep_T=keep_T, local_E=local_E)
    scale_S = weights_TK.view(-1) if weigh_input else None
    h_SF = rounded_rows.launch(x_TD, w_in, plan, "token", activation, bias_in, scale_S, tiles_in)
    out_SD = rounded_rows.launch(h_SF, w_down, plan, None, "identity", bias_down, None, tiles_down)
    return combine(out_SD, plan.place_S.view(rows, slots), None if weigh_input else weights_TK)


def _unpacked(
    x: Tensor, weight: Weight, plan: Plan, gather: str | None, activation: Activation, bias: Tensor | None,
    row_scale_S: Tensor | None, tiles: Mapping[str, int],
) -> Tensor:
    """A product with a matrix of numbers. Quantised ones are turned into numbers before it, a few experts at a time:
    those that fit :data:`UNPACKED_BYTES`, one at least, with a launch for each few.
    """
    arguments = (gather, False, activation, bias, row_scale_S, False, tiles)
    if isinstance(weight, Tensor):
        return gemm.launch(x, weight, plan, *arguments, clear=False)
    experts, rows, columns = weight.shape
    step = max(1, UNPACKED_BYTES // (rows * columns * x.element_size()))
    out: Tensor | None = None
    for first in range(0, experts, step):
        some = dequantize_experts(weight.experts(first, min(first + step, experts)), x.dtype)
        out = gemm.launch(x, some, plan, *arguments, clear=False, first_expert=first, out=out)
    assert out is not None
    return out


def grouped_mlp(
    x_ND: Tensor,
    counts_E: Tensor,
    w_in: Weight,
    w_down: Weight,
    activation: Activation,
    bias_in: Tensor | None,
    bias_down: Tensor | None,
) -> Tensor:
    """:func:`moe_kernels.grouped_mlp`, its arguments checked; at least one row.

    A grouped row is a token with one slot; the plan of grouped rows keeps their order.
    """
    ids_N1, ones_N1 = expert_of_row(counts_E, x_ND.shape[0])
    return fused_moe(
        x_ND, w_in, w_down, ids_N1, ones_N1, activation, bias_in, bias_down, "output", None, None, None
    )  # fmt: skip


def aligned_rows(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows are contiguous and start where 16-byte loads may."""
    fits = x.stride(1) == 1 and x.data_ptr() % ALIGNMENT == 0 and x.stride(0) >= x.shape[1]
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def shape_of(w_in: Weight, w_down: Weight, slots: int) -> dict[str, int]:
    """The dimensions that tiles are tuned over."""
    experts, hidden, width = w_down.shape
    return {"d": hidden, "f": width, "E": experts, "k": slots, "gated": w_in.shape[1] // width}


def dtype_of(weight: Weight, x: Tensor) -> str:
    return weight.dtype_name if isinstance(weight, QuantisedWeight) else gemm.DTYPE_NAMES[x.dtype]


def lookup(op: str, shape: Mapping[str, int], rows: int, dtype: str, x: Tensor) -> Mapping[str, int]:
    return table.tiles(op, shape=shape, rows=rows, dtype=dtype, device_name=gemm.device_name(x.device))


@triton.jit
def expert_of_row_kernel(counts_E, ids_N, ones_N, rows, E, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """ids[n] = the expert whose run of grouped rows holds n, -1 past the last run; ones[n] = 1.

    Example: counts ``[1, 0, 2]``, 4 rows: ids ``[0, 2, 2, -1]``.
    """
    experts = tl.arange(0, BLOCK_E)
    # At most all rows each, so that no sum of counts wraps.
    counts = tl.load(counts_E + experts, mask=experts < E, other=0)
    counts = tl.minimum(tl.maximum(counts, 0).to(tl.int64), rows)
    ends = tl.cumsum(counts, axis=0)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = tl.sum(((ends[None, :] <= row[:, None]) & (experts < E)[None, :]).to(tl.int32), axis=1)
    tl.store(ids_N + row, tl.where(passed < E, passed, -1), mask=row < rows)
    tl.store(ones_N + row, tl.full((BLOCK,), 1.0, tl.float32), mask=row < rows)


def expert_of_row(counts_E: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Ids ``[rows, 1]`` (int32) and weights of 1."""
    ids_N1 = torch.empty(rows, 1, dtype=torch.int32, device=counts_E.device)
    ones_N1 = torch.empty(rows, 1, dtype=torch.float32, device=counts_E.device)
    experts = counts_E.numel()
    expert_of_row_kernel[(triton.cdiv(rows, _IDS_BLOCK),)](
        counts_E.contiguous(), ids_N1, ones_N1, rows, experts,
        BLOCK_E=triton.next_power_of_2(experts), BLOCK=_IDS_BLOCK,
    )  # fmt: skip
    return ids_N1, ones_N1
