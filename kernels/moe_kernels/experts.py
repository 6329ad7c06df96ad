"""Rows and their chosen experts in, the weighted sum of the experts' outputs out.

Rows are sorted by expert and go through two grouped matrix products without padding (ScatterMoE's ParallelLinear,
with torch's ``grouped_mm`` as the product).
Legend: T rows, D hidden size, E experts, F expert width, K slots per row, S = T x K slots, N slots that an expert
here takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.arguments import check_moe

_GROUPED_MM_STRIDE_BYTES = 16
"""``grouped_mm`` refuses matrices whose row stride is no multiple of this."""


def fused_moe(x_TD: Tensor, w_gate_up_E2FD: Tensor, w_down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """y[t] = sum over k of weights[t, k] * W_down[e] (silu(W_gate[e] x[t]) * (W_up[e] x[t])) with e = ids[t, k].

    The sum runs in float32 in slot order (k = 0, 1, ...), so it depends neither on the batch nor on how rows were
    grouped; it is rounded once, to ``x``'s dtype.

    Args:
        x_TD: float32, bfloat16 or float16.
        w_gate_up_E2FD: gate rows, then up rows; same dtype, contiguous.
        w_down_EDF: same dtype, contiguous.
        ids_TK: int64 in 0..E-1, or -1: the slot's expert is elsewhere and contributes nothing here.
        weights_TK: float32.

    Returns:
        ``y_TD`` in ``x``'s dtype. T may be 0; experts may have no rows.

    Raises:
        ArgumentError: a shape or dtype does not fit.

    Example: D = F = E = 1, ``x = [[2]]``, gate 1, up 3, down 5, weight 0.5: silu(2) = 1.7616, times up 6 is 10.5696,
    times down 52.848, times the weight ``y = [[26.424]]``.
    """
    check_moe(x_TD, w_gate_up_E2FD, w_down_EDF, ids_TK, weights_TK)
    slots = ids_TK.shape[1]
    order_N, ends_E = _group_by_expert(ids_TK.flatten(), w_down_EDF.shape[0])
    h_N2F = _grouped_linear(x_TD[order_N // slots], w_gate_up_E2FD, ends_E)
    gate_NF, up_NF = h_N2F.chunk(2, dim=1)
    out_ND = _grouped_linear(F.silu(gate_NF).mul_(up_NF), w_down_EDF, ends_E)
    return _combine(out_ND, order_N, weights_TK).to(x_TD.dtype)


def _group_by_expert(ids_S: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots that have an expert here, sorted by expert, and where each expert's run ends (int32)."""
    sorted_S, order_S = ids_S.sort(stable=True)
    ids_E = torch.arange(experts, device=ids_S.device)
    # -1 sorts first: everything before expert 0 is elsewhere.
    absent = int(torch.searchsorted(sorted_S, 0))
    ends_E = torch.searchsorted(sorted_S, ids_E, right=True, out_int32=True)
    return (order_S[absent:], ends_E - absent) if absent else (order_S, ends_E)


def _grouped_linear(x_NI: Tensor, w_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Row n times the transposed weight of the expert whose run holds n."""
    if _grouped_mm_takes(x_NI, w_EOI):
        return F.grouped_mm(x_NI, w_EOI.transpose(1, 2), offs=ends_E)
    out_NO = x_NI.new_empty(x_NI.shape[0], w_EOI.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(x_NI[start:end], w_EOI[expert].t(), out=out_NO[start:end])
        start = end
    return out_NO


def _grouped_mm_takes(x_NI: Tensor, w_EOI: Tensor) -> bool:
    out_width, in_width = w_EOI.shape[1:]
    size = x_NI.element_size()
    aligned = (in_width * size) % _GROUPED_MM_STRIDE_BYTES == 0 and (out_width * size) % _GROUPED_MM_STRIDE_BYTES == 0
    # On a CPU it takes all three dtypes, on a GPU only bfloat16 everywhere.
    return aligned and (x_NI.device.type == "cpu" or x_NI.dtype == torch.bfloat16)


def _combine(out_ND: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
    """float32 sum over each row's slots, slot 0 first. Explicit, because ``sum`` adds in an order of its own."""
    rows, slots = weights_TK.shape
    hidden = out_ND.shape[1]
    every_slot_here = out_ND.shape[0] == rows * slots
    out_SD = (out_ND.new_empty if every_slot_here else out_ND.new_zeros)(rows * slots, hidden)
    out_SD.index_copy_(0, order_N, out_ND)
    weighted_TKD = out_SD.view(rows, slots, hidden) * weights_TK.unsqueeze(2)
    y_TD = weighted_TKD[:, 0].clone()
    for slot in range(1, slots):
        y_TD += weighted_TKD[:, slot]
    return y_TD
