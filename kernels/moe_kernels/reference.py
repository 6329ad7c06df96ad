"""What each op means, one token at a time. The truth that the fast paths are tested against; never served from.

Legend: T rows, D hidden size, E experts, F expert width, K experts chosen per row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_kernels.quant.weight import QuantisedWeight


def route_row(
    logits: list[float],
    *,
    top_k: int,
    score: str = "softmax",
    order: str = "score_first",
    renormalise: bool = False,
    correction_bias: list[float] | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scale: float = 1.0,
) -> tuple[list[int], list[float]]:
    """:func:`moe_kernels.route` for one row, in Python floats."""
    scores = logits if order == "choose_first" else _scores(logits, score)
    choice = [value + extra for value, extra in zip(scores, correction_bias or [0.0] * len(scores), strict=True)]
    width = len(choice) // groups

    def rank_of_group(group: int) -> float:
        best = sorted(choice[group * width : (group + 1) * width], reverse=True)
        return best[0] if group_score == "max" else sum(best[:2])

    kept = sorted(range(groups), key=lambda group: (-rank_of_group(group), group))[:top_groups]
    allowed = [expert for expert in range(len(choice)) if expert // width in kept]
    ids = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:top_k]
    weights = [scores[expert] for expert in ids]
    if order == "choose_first":
        weights = _scores(weights, score)
    total = sum(weights) if renormalise else 1.0
    return ids, [weight / total * scale for weight in weights]


def _scores(logits: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    exponentials = [math.exp(logit - max(logits)) for logit in logits]
    return [value / sum(exponentials) for value in exponentials]


def fused_moe(x_TD: Tensor, w_gate_up_E2FD: Tensor, w_down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """:func:`moe_kernels.fused_moe` as a loop over rows and slots, each expert's output summed in slot order."""
    width = w_down_EDF.shape[2]
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for row, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert < 0:
                continue
            hidden = w_gate_up_E2FD[expert] @ x_TD[row]
            gate, up = hidden[:width], hidden[width:]
            y_TD[row] += weight * (w_down_EDF[expert] @ (torch.nn.functional.silu(gate) * up)).float()
    return y_TD.to(x_TD.dtype)


def weight_value(q: QuantisedWeight, expert: int, row: int, column: int) -> float:
    """The number that stands at a place of a quantised matrix, by the definitions of layout and formats."""
    stored = column if q.order is None else q.order[expert].tolist().index(column)
    code = int(q.packed[expert, row, stored]) if q.bits == 8 else _nibble(q, expert, row, stored)
    block = (expert, row // q.scale_rows, stored // q.group if q.group else 0)
    scale = float(q.scales[block])
    if q.codes == "e4m3":
        return _minifloat(code, exponent_bits=4, mantissa_bits=3, bias=7) * scale
    if q.codes == "e2m1":
        return _minifloat(code, exponent_bits=2, mantissa_bits=1, bias=1) * 2.0 ** (int(scale) - 127)
    return (code - (1 << (q.bits - 1) if q.zeros is None else int(q.zeros[block]))) * scale


def _nibble(q: QuantisedWeight, expert: int, row: int, column: int) -> int:
    run, inside = divmod(column, 128)
    byte = int(q.packed[expert, row, 64 * run + inside % 64])
    return byte & 15 if inside < 64 else byte >> 4


def _minifloat(code: int, *, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Open Compute Project's small floats: sign, exponent, mantissa; exponent 0 has no leading one."""
    mantissa = code % (1 << mantissa_bits) / (1 << mantissa_bits)
    exponent = (code >> mantissa_bits) % (1 << exponent_bits)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    return sign * (mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))
