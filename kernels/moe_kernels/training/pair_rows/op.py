"""What the gates do in the backward pass: weighted rows in grouped order, and the gates' own gradients.

Legend: T tokens, K slots per token, S = T x K pairs, E experts, C columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.plan.types import Plan
from moe_kernels.training.grouped_outer.op import Rows, source_rows


def group_rows(rows: Tensor, gates_TK: Tensor, plan: Plan, *, layout: Rows) -> Tensor:
    """``[S, C]`` in grouped order: gate x row for every pair that an expert owns, zeros behind them.

    Example: K = 2, order ``[1, 0]``, rows ``[[3]]`` by token, gates ``[[10, 100]]``: ``[[300], [30]]``.
    """
    if not backend.use_triton(rows):
        owned_S = torch.arange(plan.order_S.shape[0], device=rows.device) < plan.ends_E[-1]
        weighted_SC = rows[source_rows(plan, layout)] * gates_TK.flatten()[plan.order_S.long()].unsqueeze(1)
        return weighted_SC.masked_fill(~owned_S.unsqueeze(1), 0).to(rows.dtype)
    from moe_kernels.training.pair_rows.kernel import launch_group_rows

    out_SC = rows.new_empty(plan.order_S.shape[0], rows.shape[1])
    if out_SC.numel():
        rows, gates_TK = rows.contiguous(), gates_TK.contiguous()
        launch_group_rows(rows, out_SC, gates_TK, plan.order_S, plan.ends_E, slots=plan.slots, layout=layout)
    return out_SC


def pair_dots(
    a: Tensor, b: Tensor, plan: Plan, *, a_rows: Rows | Literal["expert"], b_rows: Rows | Literal["expert"]
) -> Tensor:
    """``[T, K]`` float32 (float64 for float64): the dot product of the two rows of each pair, 0 if it is dropped.

    "expert" is the row of the expert that owns the pair.

    Example: a ``[[1, 2]]``, b ``[[3, 4]]``: 11.
    """
    out_TK = a.new_empty(
        plan.place_S.shape[0] // plan.slots, plan.slots, dtype=torch.promote_types(a.dtype, torch.float32)
    )
    if not backend.use_triton(a):
        place_S = plan.place_S.long()
        dots_S = (_pair_rows(a, plan, a_rows).to(out_TK.dtype) * _pair_rows(b, plan, b_rows)).sum(1)
        return torch.where(place_S < 0, 0.0, dots_S).view_as(out_TK)
    from moe_kernels.training.pair_rows.kernel import launch_pair_dots

    if out_TK.numel():
        a, b = a.contiguous(), b.contiguous()
        launch_pair_dots(a, b, out_TK, plan.place_S, plan.ends_E, a_rows=a_rows, b_rows=b_rows)
    return out_TK


def _pair_rows(stored: Tensor, plan: Plan, rows: str) -> Tensor:
    """The row of each pair, by pair; any row for a dropped one."""
    pairs_S = torch.arange(plan.place_S.shape[0], device=stored.device)
    place_S = plan.place_S.clamp(min=0).long()
    match rows:
        case "token":
            return stored[pairs_S // plan.slots]
        case "pair":
            return stored[pairs_S]
        case "grouped":
            return stored[place_S]
    # A dropped pair may find no expert behind place 0; then the last row stands in.
    expert_S = torch.searchsorted(plan.ends_E, place_S.int(), right=True).clamp(max=stored.shape[0] - 1)
    return stored[expert_S]
