"""Turns top_k, top_p and min_p into one number per row: the lowest scaled logit that may be drawn.

Most rows are decided by their largest logits, the head of the sorted vocabulary, which costs far less to find than a
sort of all. Whether a head was wide enough for a top_p is known only when the device has computed it; the reader then
tries again with a wider head. All widths that decide a row give the same number, so no row depends on its neighbours.
Legend: S rows, V vocabulary, K head of the sorted vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.messages import SamplingParams
from services.model.transfer import upload

HEADS = (256, 4096, 32_768)


def heads(vocab_size: int) -> tuple[int, ...]:
    """Return the widths of heads to try, ascending. The last is the vocabulary, which decides every row."""
    return (*(head for head in HEADS if head * 4 <= vocab_size), vocab_size)


def width(params: SamplingParams, widths: Sequence[int]) -> int:
    """Return the first of ``widths`` that can decide a row; 0 if a row without top_k and top_p needs no head."""
    if params.top_k <= 0 and params.top_p >= 1:
        return 0
    return next((width for width in widths if params.top_k <= width), widths[-1])


def thresholds(
    scaled_SV: Tensor, params: Sequence[SamplingParams], widths: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Return the lowest logit kept of rows whose largest is 0, [S] float32, and which rows are decided; None: all.

    top_k keeps the k largest. top_p keeps the smallest set of the largest among these that holds ``top_p`` of their
    mass. min_p keeps tokens at least ``min_p`` times as likely as the likeliest. Does not wait for the device.

    Args:
        widths: width of each row's head, from :func:`width`.
    """
    device, vocab_size = scaled_SV.device, scaled_SV.shape[1]
    floor_of = {min_p: _min_p_floor(min_p) for min_p in {row.min_p for row in params}}
    floors_S = upload(np.array([floor_of[row.min_p] for row in params], dtype=np.float32), device)
    decided_S: Tensor | None = None
    for wide in sorted(set(widths) - {0}):
        rows = [index for index, asked in enumerate(widths) if asked == wide]
        index_S = upload(np.array(rows), device)
        floor_S, found_S = _rank_floor(scaled_SV[index_S], [params[index] for index in rows], wide)
        floors_S[index_S] = torch.maximum(floors_S[index_S], floor_S)
        if wide < vocab_size and any(not 0 < params[index].top_k <= wide for index in rows):
            decided_S = torch.ones_like(floors_S, dtype=torch.bool) if decided_S is None else decided_S
            decided_S[index_S] = found_S
    return floors_S, decided_S


def _min_p_floor(min_p: float) -> float:
    if min_p <= 0:
        return -torch.inf
    return float(torch.tensor(min(min_p, 1.0), dtype=torch.float32).log())


def _rank_floor(scaled_SV: Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor]:
    """Return thresholds from the ``width`` largest logits, and whether these decide; -inf where they do not."""
    vocab_size, device = scaled_SV.shape[1], scaled_SV.device
    whole = width == vocab_size
    head_SK, ids_SK = scaled_SV.sort(dim=-1, descending=True) if whole else scaled_SV.topk(width, dim=-1)
    top_k = [row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in params]
    top_k_S = upload(np.array(top_k), device)
    top_p_S = upload(np.array([row.top_p for row in params], dtype=np.float64), device)
    last_S = top_k_S.clamp(max=width) - 1
    # Running sums are taken in order and in float64, so they do not depend on how wide the head is.
    mass_SK = scaled_SV.softmax(dim=-1).gather(1, ids_SK).cumsum(dim=-1, dtype=torch.float64)
    total_S = torch.where(top_k_S < vocab_size, mass_SK.gather(1, last_S[:, None])[:, 0], 1.0)
    reached_S = (mass_SK < (top_p_S * total_S)[:, None]).sum(dim=-1)
    cut_S = torch.where(top_p_S < 1, torch.minimum(reached_S, last_S), last_S)
    decided_S = (top_k_S <= width) | ((top_p_S < 1) & (top_k_S >= vocab_size) & (reached_S < width))
    floor_S = head_SK.gather(1, cut_S[:, None])[:, 0]
    return torch.where(decided_S, floor_S, -torch.inf), decided_S
