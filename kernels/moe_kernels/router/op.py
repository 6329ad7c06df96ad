"""Router logits in, the chosen experts and their weights out: one function for all families, driven by flags.

Legend: T rows, E experts, K chosen per row, G groups of experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import check_no_gradient, check_route, check_route_flags, check_route_tensors
from moe_kernels.invariant.reference import in_whole_vectors

Score = Literal["softmax", "sigmoid"]
Order = Literal["score_first", "choose_first"]
GroupScore = Literal["max", "top2_sum"]

_RENORM_EPS = 1e-20
"""Keeps a row whose sigmoid scores all vanish from dividing by 0; too small to change any other sum in float32."""
_INSTEAD = "detach it, and compute the chosen experts' weights from the logits again, as SparseMLP does"


@backend.eager
def route(
    logits_TE: Tensor,
    *,
    top_k: int,
    score: Score = "softmax",
    order: Order = "score_first",
    renormalise: bool = False,
    correction_bias_E: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "max",
    scale: float = 1.0,
    keep_T: Tensor | None = None,
    ids_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts per row and weigh them, in float32 whatever the logits' dtype.

    ``score_first``: s = score(logits); the K largest s + bias are chosen, their weight is s, without the bias.
    ``choose_first``: the K largest logits + bias are chosen, their weight is score over those K logits alone.
    With ``groups`` > 1 the experts lie in equal runs; only the ``top_groups`` runs with the largest group score (the
    largest choice value of a run, or the sum of its two largest) can be chosen from. Then ``renormalise`` divides
    a row's weights by their sum, and ``scale`` multiplies them.

    Equal values go to the lowest expert id, so the choice is the same on every device and for every batch. NaN counts
    as the largest value and stays in its row; whatever the logits, the ids of a row are distinct and within 0..E-1.

    Args:
        logits_TE: any floating dtype; rows may be strided.
        correction_bias_E: added for the choice only (DeepSeek-V3).
        keep_T: bool; rows where it is false (sequences that have ended, "Who Says Elephants Can't Run" 3.5) get ids
            -1 and weights 0.
        ids_dtype: int64 or int32.

    Returns:
        ``ids_TK``, largest choice value first, and ``weights_TK`` float32. On CUDA one launch.

    Raises:
        ArgumentError: a shape, dtype or device does not fit, fewer than ``top_k`` experts can be chosen from, or a
            gradient is asked for, which this op does not have.

    Example: logits ``[[0, ln 2, 0, ln 4]]`` have softmax ``[1/8, 2/8, 1/8, 4/8]``. ``top_k=2`` gives ids
    ``[[3, 1]]`` and weights ``[[0.5, 0.25]]``; with ``renormalise`` ``[[2/3, 1/3]]``. ``top_k=3`` appends expert 0,
    not 2: they tie.
    """
    check_route(logits_TE, top_k, correction_bias_E, groups, top_groups)
    check_route_flags(score, order, group_score, scale, ids_dtype)
    check_route_tensors(logits_TE, correction_bias_E, keep_T)
    check_no_gradient("route", _INSTEAD, logits=logits_TE, correction_bias=correction_bias_E)
    if backend.use_triton(logits_TE):
        from moe_kernels.router import kernel as router_triton

        with backend.device_of(logits_TE):
            return router_triton.launch(
                logits_TE,
                top_k=top_k,
                sigmoid=score == "sigmoid",
                choose_first=order == "choose_first",
                renormalise=renormalise,
                bias_E=correction_bias_E,
                groups=groups,
                top_groups=top_groups,
                top2_sum=group_score == "top2_sum",
                scale=scale,
                keep_T=keep_T,
                ids_dtype=ids_dtype,
            )
    logits_TE = logits_TE.float()
    scores_TE = logits_TE if order == "choose_first" else _score(logits_TE, score)
    choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E.float()
    allowed_TE = _best_groups(choice_TE, groups, top_groups, group_score) if top_groups < groups else None
    ids_TK = _largest(choice_TE, top_k, allowed_TE)
    weights_TK = scores_TE.gather(1, ids_TK)
    if order == "choose_first":
        weights_TK = _score(weights_TK, score)
    if renormalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + _RENORM_EPS)
    weights_TK = weights_TK if scale == 1.0 else weights_TK * scale
    if keep_T is not None:
        gone_T1 = ~keep_T.unsqueeze(1)
        ids_TK, weights_TK = ids_TK.masked_fill(gone_T1, -1), weights_TK.masked_fill(gone_T1, 0.0)
    return ids_TK.to(ids_dtype), weights_TK


def _score(logits: Tensor, score: Score) -> Tensor:
    """Of each row by itself: its bits do not depend on how many rows there are."""
    return torch.softmax(logits, dim=-1) if score == "softmax" else in_whole_vectors(torch.sigmoid, logits)


def _best_groups(choice_TE: Tensor, groups: int, top_groups: int, group_score: GroupScore) -> Tensor:
    """Bool ``[T, E]``: whether the expert lies in one of the row's best groups."""
    rows, experts = choice_TE.shape
    choice_TGW = choice_TE.view(rows, groups, experts // groups)
    if group_score == "max" or choice_TGW.shape[2] == 1:
        score_TG = choice_TGW.amax(dim=2)
    else:
        score_TG = choice_TGW.topk(2, dim=2).values.sum(dim=2)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, _largest(score_TG, top_groups), True)
    return kept_TG.repeat_interleave(choice_TGW.shape[2], dim=1)


def _largest(values_TE: Tensor, k: int, allowed_TE: Tensor | None = None) -> Tensor:
    """Indices of the k largest allowed values of each row, largest first, equal values by index.

    ``topk`` leaves the order of equal values open. For the few experts of a row a stable sort costs as little.
    """
    order_TE: Tensor = values_TE.sort(dim=1, descending=True, stable=True).indices
    if allowed_TE is not None:
        # Not by -inf in the values: an allowed value may be -inf itself.
        sorted_allowed_TE = allowed_TE.gather(1, order_TE).to(torch.uint8)
        order_TE = order_TE.gather(1, sorted_allowed_TE.sort(dim=1, descending=True, stable=True).indices)
    return order_TE[:, :k]
