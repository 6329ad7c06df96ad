"""The expert ops in plain torch: what runs on a CPU, and what the kernels are held against.

Rows are sorted by expert and go through two grouped matrix products without padding, with ``F.grouped_mm`` as the
product where it can be. Legend: T rows, D hidden size, E experts, F expert width, K slots, S = T x K pairs,
N pairs that an expert here takes, O and I a matrix's output and input columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.activations.op import Activation, activate
from moe_kernels.grouped_gemm.op import grouped_product
from moe_kernels.plan.op import local_ids
from moe_kernels.plan.types import Plan
from moe_kernels.quant.cached import expert_product
from moe_kernels.quant.weight import QuantisedWeight, Weight


def fused_moe(
    x_TD: Tensor,
    w_in: Weight,
    w_down: Weight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation,
    bias_in: Tensor | None,
    bias_down: Tensor | None,
    weights_on: str,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
) -> Tensor:
    """:func:`moe_kernels.fused_moe`, its arguments checked."""
    slots, experts = ids_TK.shape[1], w_down.shape[0]
    order_N, ends_E = planned_pairs(ids_TK, experts, keep_T, local_E, plan)
    x_ND = x_TD[order_N // slots]
    if weights_on == "input":
        x_ND = (x_ND * weights_TK.flatten()[order_N].unsqueeze(1)).to(x_ND.dtype)  # a product in float32
        weights_TK = torch.ones_like(weights_TK)
    h_NF = activate(_grouped_linear(x_ND, w_in, bias_in, ends_E), activation)
    return combine_pairs(_grouped_linear(h_NF, w_down, bias_down, ends_E), order_N, weights_TK).to(x_TD.dtype)


def experts_of_rows(counts_E: Tensor, rows: int) -> Tensor:
    """int64 ``[rows]``: the expert of each row of a grouped buffer, -1 past the counts' sum."""
    ends_E = counts_E.clamp(0, rows).long().cumsum(0)  # a sum of unbounded ones may wrap around
    ids_N = torch.searchsorted(ends_E, torch.arange(rows, device=counts_E.device), right=True)
    return torch.where(ids_N < len(counts_E), ids_N, -1)


def planned_pairs(
    ids_TK: Tensor, experts: int, keep_T: Tensor | None, local_E: Tensor | None, plan: Plan | None
) -> tuple[Tensor, Tensor]:
    """:func:`group_by_expert` of the pairs that ``plan``, or else the other arguments, leave here."""
    if plan is not None:
        return plan.order_S[: int(plan.ends_E[-1])].long(), plan.ends_E
    return group_by_expert(local_ids(ids_TK, experts, keep_T, local_E).flatten(), experts)


def group_by_expert(ids_S: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pairs that have an expert here, sorted by expert, and where each expert's run ends (int32)."""
    sorted_S, order_S = ids_S.sort(stable=True)
    ids_E = torch.arange(experts, device=ids_S.device, dtype=ids_S.dtype)
    # Negative ids sort first: everything before expert 0 is elsewhere.
    absent = int(torch.searchsorted(sorted_S, ids_E[:1]))
    ends_E = torch.searchsorted(sorted_S, ids_E, right=True, out_int32=True)
    return (order_S[absent:], ends_E - absent) if absent else (order_S, ends_E)


def _grouped_linear(x_NI: Tensor, w_EOI: Weight, bias_EO: Tensor | None, ends_E: Tensor) -> Tensor:
    """Row n times the transposed weight of the expert whose run holds n, plus its bias."""
    if isinstance(w_EOI, Tensor):
        out_NO = grouped_product(x_NI, w_EOI, ends_E)
    else:
        out_NO = _quantised_product(x_NI, w_EOI, ends_E)
    return out_NO if bias_EO is None else out_NO + bias_of_rows(bias_EO, ends_E, len(x_NI))


def bias_of_rows(bias_EO: Tensor, ends_E: Tensor, rows: int) -> Tensor:
    """The bias of the expert whose run holds each row: ``[rows, O]``."""
    rows_N = torch.arange(rows, device=bias_EO.device, dtype=ends_E.dtype)
    return bias_EO[torch.searchsorted(ends_E, rows_N, right=True)]


def _quantised_product(x_NI: Tensor, q: QuantisedWeight, ends_E: Tensor) -> Tensor:
    """:func:`grouped_product`; experts without rows are not looked at."""
    out_NO = x_NI.new_empty(x_NI.shape[0], q.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            out_NO[start:end] = expert_product(q, expert, x_NI[start:end])
        start = end
    return out_NO


def combine_pairs(out_ND: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
    """float32 sum over each row's slots, slot 0 first. Explicit, because ``sum`` adds in an order of its own."""
    rows, slots = weights_TK.shape
    hidden = out_ND.shape[1]
    every_slot_here = out_ND.shape[0] == rows * slots
    out_SD = (out_ND.new_empty if every_slot_here else out_ND.new_zeros)(rows * slots, hidden)
    out_SD.index_copy_(0, order_N, out_ND)
    weighted_TKD = out_SD.view(rows, slots, hidden) * weights_TK.unsqueeze(2)
    if not every_slot_here:
        # The weight of an absent slot may be anything: choose, do not multiply by 0.
        present_S = torch.zeros(rows * slots, dtype=torch.bool, device=order_N.device).index_fill_(0, order_N, True)
        weighted_TKD = torch.where(present_S.view(rows, slots, 1), weighted_TKD, 0)
    y_TD = weighted_TKD[:, 0].clone()
    for slot in range(1, slots):
        y_TD += weighted_TKD[:, slot]
    return y_TD
