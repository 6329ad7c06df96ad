"""Log-probabilities of tokens under the model's own distribution.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.messages import TokenLogprob


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprob]:
    """Score ``token_ids[r]`` in row r, with the ``alternatives[r]`` likeliest tokens beside it, likeliest first."""
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    targets_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)[:, None]
    chosen = logprobs_RV.gather(1, targets_R1)[:, 0].tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    # Each width by itself: which of several equal tokens is listed must not depend on what other rows ask for.
    for width in sorted(set(alternatives) - {0}):
        rows = [row for row, asked in enumerate(alternatives) if asked == width]
        for row, top in zip(rows, _likeliest(logprobs_RV, rows, width), strict=True):
            tops[row] = top
    return [TokenLogprob(logprob, top) for logprob, top in zip(chosen, tops, strict=True)]


def _likeliest(logprobs_RV: Tensor, rows: Sequence[int], width: int) -> list[list[tuple[int, float]]]:
    index_R = torch.tensor(rows, device=logprobs_RV.device)
    values, ids = logprobs_RV[index_R].topk(min(width, logprobs_RV.shape[1]), dim=-1)
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [sorted(zip(*pair, strict=True), key=lambda entry: (-entry[1], entry[0])) for pair in pairs]
