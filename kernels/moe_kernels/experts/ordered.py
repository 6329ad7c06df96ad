"""Experts whose first matrix has its columns in an order of its own per expert (act-order): x is gathered once.

Every pair becomes a row of its own, in its expert's order; all regimes then run as for any weight. The order of the
second matrix's columns is that of the first one's rows, where :func:`fold_order` puts it when weights are loaded.
Legend: T rows, K slots, S = T x K pairs, D hidden size, E experts, F expert width, O rows of the first matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.arguments import require
from moe_kernels.combine.op import combine
from moe_kernels.plan.op import local_ids
from moe_kernels.plan.types import Plan
from moe_kernels.quant.weight import QuantisedWeight, Weight

_GATHERED = 4096
"""Pairs gathered at a time: their indices take 8 bytes a column."""


def by_pair(
    run: Callable[[Tensor, QuantisedWeight, Tensor, Tensor], Tensor],
    x_TD: Tensor,
    w_in: QuantisedWeight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    weigh_input: bool,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    plan: Plan | None,
) -> Tensor:
    """``y_TD``. ``run``: fused_moe of rows with one slot each, weights 1, or as given if ``weigh_input``."""
    rows, slots = ids_TK.shape
    experts = w_in.shape[0]
    expert_S = _planned(plan) if plan is not None else local_ids(ids_TK, experts, keep_T, local_E).flatten()
    weight_S1 = weights_TK.reshape(-1, 1) if weigh_input else torch.ones_like(weights_TK).view(-1, 1)
    out_SD = run(_gathered(x_TD, w_in, expert_S, slots), w_in.without_order(), expert_S.view(-1, 1), weight_S1)
    pairs = torch.arange(rows * slots, device=x_TD.device)
    place_TK = torch.where(expert_S >= 0, pairs, -1).view(rows, slots)
    return combine(out_SD, place_TK, None if weigh_input else weights_TK)


def _planned(plan: Plan) -> Tensor:
    expert_S = torch.searchsorted(plan.ends_E, plan.place_S, right=True)
    return torch.where(plan.place_S >= 0, expert_S, -1)


def _gathered(x_TD: Tensor, w_in: QuantisedWeight, expert_S: Tensor, slots: int) -> Tensor:
    assert w_in.order is not None
    out_SD = x_TD.new_empty(len(expert_S), x_TD.shape[1])
    tokens_S = torch.arange(len(expert_S), device=x_TD.device) // slots
    for first in range(0, len(expert_S), _GATHERED):
        piece = slice(first, first + _GATHERED)
        order_ND = w_in.order[expert_S[piece].long().clamp(min=0)].long()
        out_SD[piece] = x_TD[tokens_S[piece]].gather(1, order_ND)
    return out_SD


def fold_order(
    w_in: Weight, w_down: QuantisedWeight, bias_in: Tensor | None = None
) -> tuple[Weight, QuantisedWeight, Tensor | None]:
    """The same layer with the columns of ``w_down`` in the order of h, at no cost later: the rows of ``w_in`` (gate and
    up alike) and of its bias move instead. Once, when weights are loaded.

    Raises:
        ArgumentError: rows of ``w_in`` share scales, or are no multiple of the columns of ``w_down``.
    """
    if w_down.order is None:
        return w_in, w_down, bias_in
    halves, rest = divmod(w_in.shape[1], w_down.shape[2])
    fits = w_in.shape[0] == w_down.shape[0] and halves in (1, 2) and rest == 0
    require(fits, f"w_in must have a row, or two, for each column of w_down {w_down.shape}, found {tuple(w_in.shape)}")
    order_EF = w_down.order.long()
    order_EO = torch.cat([order_EF + half * w_down.shape[2] for half in range(halves)], dim=1)
    bias = None if bias_in is None else bias_in.gather(1, order_EO)
    if isinstance(w_in, Tensor):
        return _rows_in_order(w_in, order_EO), replace(w_down, order=None), bias
    shared = f"rows of w_in {w_in.format} share scales, so they cannot move to where w_down's order wants them"
    require(w_in.scale_rows == 1, shared)
    moved = {name: _rows_in_order(part, order_EO) for name, part in w_in.tensors().items() if name != "order"}
    return w_in.with_tensors(w_in.tensors() | moved), replace(w_down, order=None), bias


def _rows_in_order(part: Tensor, order_EO: Tensor) -> Tensor:
    return part.gather(1, order_EO.unsqueeze(2).expand(-1, -1, part.shape[2]))
