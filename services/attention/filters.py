"""top_k, top_p and min_p as one number per row: the lowest scaled logit that may be drawn.

Legend: S rows, V vocabulary, K head of the sorted vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.messages import SamplingParams

HEADS = (256, 4096)
"""Most rows are decided by their largest logits, which cost far less to find than a sort of the vocabulary."""


def thresholds(scaled_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Lowest logit kept, [S] float32, of rows whose largest logit is 0.

    top_k keeps the k largest; top_p the smallest set of the largest among these that holds ``top_p`` of their mass;
    min_p what is at least ``min_p`` times as likely as the likeliest. Heads of growing width are tried first; a
    row that none decides is sorted as a whole. All give the same number, so no row depends on its neighbours.
    """
    floors_S = torch.tensor([_min_p_floor(row) for row in params], dtype=torch.float32, device=scaled_SV.device)
    open_rows = [index for index, row in enumerate(params) if row.top_k > 0 or row.top_p < 1]
    vocab_size = scaled_SV.shape[1]
    for width in (*(head for head in HEADS if head * 4 <= vocab_size), vocab_size):
        if not open_rows:
            break
        index_S = torch.tensor(open_rows, device=scaled_SV.device)
        floor_S, decided = _rank_floor(scaled_SV[index_S], [params[index] for index in open_rows], width)
        floors_S[index_S] = torch.maximum(floors_S[index_S], floor_S)
        open_rows = [index for index, done in zip(open_rows, decided, strict=True) if not done]
    return floors_S


def _min_p_floor(params: SamplingParams) -> float:
    if params.min_p <= 0:
        return -torch.inf
    return float(torch.tensor(min(params.min_p, 1.0), dtype=torch.float32).log())


def _rank_floor(scaled_SV: Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Tensor, list[bool]]:
    """Thresholds from the ``width`` largest logits (-inf where these do not decide), and whether they decide."""
    vocab_size = scaled_SV.shape[1]
    head_SK, ids_SK = scaled_SV.topk(width, dim=-1)
    top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in params]
    top_k_S = torch.tensor(top_k, device=scaled_SV.device)
    top_p_S = torch.tensor([row.top_p for row in params], dtype=torch.float64, device=scaled_SV.device)
    last_S = top_k_S.clamp(max=width) - 1
    # Running sums are taken in order and in float64, so they do not depend on how wide the head is.
    mass_SK = scaled_SV.softmax(dim=-1).gather(1, ids_SK).cumsum(dim=-1, dtype=torch.float64)
    total_S = torch.where(top_k_S < vocab_size, mass_SK.gather(1, last_S[:, None])[:, 0], 1.0)
    reached_S = (mass_SK < (top_p_S * total_S)[:, None]).sum(dim=-1)
    cut_S = torch.where(top_p_S < 1, torch.minimum(reached_S, last_S), last_S)
    decided_S = (top_k_S <= width) | ((top_p_S < 1) & (top_k_S >= vocab_size) & (reached_S < width))
    floor_S = head_SK.gather(1, cut_S[:, None])[:, 0]
    return torch.where(decided_S, floor_S, -torch.inf), decided_S.tolist()
