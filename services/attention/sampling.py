"""The sampler: logits of one step in, one drawn token per row out.

A row's logits pass, in this order: repetition penalty (over prompt and generated tokens), frequency and presence
penalty (generated tokens), logit_bias, the ban of end tokens before ``min_tokens``, temperature, top_k, top_p (of
what top_k left, renormalised), min_p; then the Gumbel-max draw of :mod:`services.attention.noise`. Every filter is a
threshold on the logit, so tokens that tie with the last one kept are kept too, and the result does not depend on
a sort. Log-probabilities are those of the model's own distribution, before any of this.

Each row is computed by operations that treat rows alike and apart: a draw never depends on the batch.
Legend: R rows, V vocabulary, S rows that are drawn with a temperature, K head of the sorted vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from services.attention.draw_keys import draw_keys
from services.attention.draw_row import DrawRow
from services.attention.filters import thresholds
from services.attention.logprobs import token_logprobs
from services.attention.noise import GumbelNoise
from services.attention.plan import Outcome
from services.errors import InternalError, RequestError
from services.messages import SamplingParams

MIN_TEMPERATURE = 1e-6
"""Lower temperatures above 0 count as this one: differences of logits then still fit float32."""


class Sampler:
    """Draws tokens over a vocabulary of ``vocab_size`` on ``device``. Holds no state of any request."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._noise = GumbelNoise(vocab_size, device)

    def draw(self, logits_RV: Tensor, rows: Sequence[DrawRow]) -> list[Outcome]:
        """One token per row of ``logits_RV`` (float32, left as it is); ties go to the lowest id.

        A row without a largest finite logit fails with :class:`InternalError`; the others are not affected.
        """
        edited_RV = self._edit(logits_RV, rows)
        best_R, tokens_R = edited_RV.max(dim=-1)  # NaN counts as the largest, and the first of equals wins
        healthy = best_R.isfinite().tolist()
        drawn = [index for index, row in enumerate(rows) if row.samples and healthy[index]]
        if drawn:
            chosen_S = self._sample(_pick(edited_RV, drawn), _pick(best_R, drawn), [rows[index] for index in drawn])
            tokens_R[torch.tensor(drawn, device=tokens_R.device)] = chosen_S
        tokens = tokens_R.tolist()
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and healthy[i]]
        outcomes = [
            Outcome(token_id=token) if is_healthy else Outcome(error=broken_logits())
            for token, is_healthy in zip(tokens, healthy, strict=True)
        ]
        if asked:
            alternatives = [rows[index].params.logprobs or 0 for index in asked]
            scores = token_logprobs(_pick(logits_RV, asked), [tokens[index] for index in asked], alternatives)
            for index, score in zip(asked, scores, strict=True):
                outcomes[index] = Outcome(token_id=tokens[index], logprob=score)
        return outcomes

    def _edit(self, logits_RV: Tensor, rows: Sequence[DrawRow]) -> Tensor:
        edited = [index for index, row in enumerate(rows) if row.may_edit and row.edits]
        if not edited:
            return logits_RV
        logits_RV = logits_RV.clone()
        for index in edited:
            _edit_row(logits_RV[index], rows[index], self._vocab_size)
        return logits_RV

    def _sample(self, logits_SV: Tensor, best_S: Tensor, rows: Sequence[DrawRow]) -> Tensor:
        """Token ids [S] drawn from logits whose largest, ``best_S``, is finite."""
        temperatures = [max(row.params.temperature, MIN_TEMPERATURE) for row in rows]
        temperatures_S = torch.tensor(temperatures, dtype=torch.float32, device=logits_SV.device)
        # With the largest at 0, a division by a tiny temperature can only underflow to -inf, which is never drawn.
        scaled_SV = logits_SV.sub(best_S[:, None]).div_(temperatures_S[:, None])
        filtered = [index for index, row in enumerate(rows) if _filters(row.params)]
        if filtered:
            floors_S = torch.full_like(best_S, -torch.inf)
            params = [rows[index].params for index in filtered]
            floors_S[torch.tensor(filtered, device=floors_S.device)] = thresholds(_pick(scaled_SV, filtered), params)
            scaled_SV.masked_fill_(scaled_SV < floors_S[:, None], -torch.inf)
        keys = draw_keys([row.key for row in rows], [len(row.token_ids) for row in rows])
        return scaled_SV.add_(self._noise.rows(keys)).argmax(dim=-1)


def broken_logits() -> RequestError:
    """For a sequence whose hidden states or logits are not finite."""
    return InternalError(
        "The model produced numbers that are not finite for this request.",
        hint="If it repeats, serve the checkpoint with --dtype float32 or bfloat16 and check its files.",
    )


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of ``values``; the tensor itself where that is all of them."""
    if len(rows) == values.shape[0]:
        return values
    return values[torch.tensor(rows, device=values.device)]


def _edit_row(logits_V: Tensor, row: DrawRow, vocab_size: int) -> None:
    params, device = row.params, logits_V.device
    if params.repetition_penalty != 1:
        seen = _token_tensor(row.token_ids, device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.generated:
        generated = _token_tensor(row.token_ids[row.prompt_len :], device)
        seen, counts = torch.unique(generated, return_counts=True)
        logits_V[seen] -= (params.presence_penalty + params.frequency_penalty * counts.double()).float()
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        logits_V[biased] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    if row.bans_stop:
        banned = [token for token in row.stop_ids if 0 <= token < vocab_size]
        logits_V[torch.tensor(banned, dtype=torch.int64, device=device)] = -torch.inf


def _token_tensor(token_ids: Sequence[int], device: torch.device) -> Tensor:
    """One id or more as int64. By way of an array: ``torch.tensor`` takes 0.1 us for each element of a list."""
    return torch.frombuffer(array("q", token_ids), dtype=torch.int64).to(device)
