"""The sampler: logits of one step in, one drawn token per row out.

A row's logits pass, in this order: repetition penalty (over prompt and generated tokens), frequency and presence
penalty (generated tokens), logit_bias, the ban of end tokens before ``min_tokens``, temperature, top_k, top_p (of
what top_k left, renormalised), min_p; then the Gumbel-max draw of :mod:`services.attention.sampling.noise`. Every
filter is a threshold on the logit, so tokens that tie with the last one kept are kept too, and the result does not
depend on a sort. Log-probabilities are those of the model's own distribution, before any of this.

Each row is computed by operations that treat rows alike and apart: a draw never depends on the batch.
Legend: R rows, V vocabulary, S rows that are drawn with a temperature, K head of the sorted vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.attention.sampling.edits import Edits
from services.attention.sampling.filters import heads, thresholds, width
from services.attention.sampling.histories import History
from services.attention.sampling.logprobs import TokenScores
from services.attention.sampling.noise import GumbelNoise
from services.attention.sequences.plan import Outcome
from services.attention.sequences.sequence import DrawRow, draw_keys
from services.errors import InternalError, RequestError
from services.model.transfer import Mark, download, upload

MIN_TEMPERATURE = 1e-6
"""Lower temperatures above 0 count as this one: differences of logits then still fit float32."""
_BROKEN = -1
"""In place of a token."""


class Sampler:
    """Draws tokens over a vocabulary of ``vocab_size`` on ``device``. No draw depends on those before it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise, self._edits = GumbelNoise(vocab_size, device), Edits(vocab_size, device)
        widths = heads(vocab_size)
        # To draw again is cheap where nothing was launched meanwhile; else a wide head at once costs less.
        starts_wide = device.type != "cpu" and len(widths) > 2
        self._widths, self._every_width = widths[1:] if starts_wide else widths, widths

    def draw(
        self, logits_RV: Tensor, rows: Sequence[DrawRow], history: History | None = None, *, ahead: int = 0
    ) -> Drawn:
        """One token per row of ``logits_RV`` (float32, left as it is); ties go to the lowest id. Does not wait.

        Args:
            history: what came before, of the rows that look back, in their order; None will do where none does.
            ahead: how many tokens follow those that ``rows`` know: in ``history`` they are.
        """
        edited_RV = self._edits.of(logits_RV, rows, history, ahead)
        best_R, tokens_R = edited_RV.max(dim=-1)  # NaN counts as the largest, and the first of equals wins
        sampled, decided_S = [index for index, row in enumerate(rows) if row.samples], None
        if sampled:
            chosen_S, decided_S = self._sample(
                _pick(edited_RV, sampled), _pick(best_R, sampled), [rows[index] for index in sampled], ahead
            )
            tokens_R = _put(tokens_R, sampled, chosen_S)
        asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        alternatives = [rows[index].params.logprobs or 0 for index in asked]
        return Drawn(
            rows=rows,
            tokens_R=tokens_R,
            told_R=download(torch.where(best_R.isfinite(), tokens_R, _BROKEN)),
            asked=asked,
            scores=TokenScores(_pick(logits_RV, asked), _pick(tokens_R, asked), alternatives) if asked else None,
            open=None if decided_S is None else _Open(self, logits_RV, history, sampled, download(decided_S)),
        )

    def _sample(
        self, logits_SV: Tensor, best_S: Tensor, rows: Sequence[DrawRow], ahead: int
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [S] drawn from logits whose largest is ``best_S``, and whose filters are decided: None for all.

        What is drawn where ``best_S`` is not finite means nothing.
        """
        temperatures = [max(row.params.temperature, MIN_TEMPERATURE) for row in rows]
        temperatures_S1 = upload(np.array(temperatures, dtype=np.float32), logits_SV.device)[:, None]
        # With the largest at 0, a division by a tiny temperature can only underflow to -inf, which is never drawn.
        scaled_SV, decided_S = logits_SV.sub(best_S[:, None]).div_(temperatures_S1), None
        if any(row.filters for row in rows):
            widths = [width(row.params, self._widths_of(row)) for row in rows]
            floors_S, decided_S = thresholds(scaled_SV, [row.params for row in rows], widths)
            scaled_SV.masked_fill_(scaled_SV < floors_S[:, None], -torch.inf)
        keys = draw_keys([row.key for row in rows], [len(row.token_ids) + ahead for row in rows])
        return scaled_SV.add_(self._noise.rows(keys)).argmax(dim=-1), decided_S

    def _widths_of(self, row: DrawRow) -> Sequence[int]:
        """Heads to try for ``row``. With a top_k the first one that holds it decides."""
        return self._every_width if row.params.top_k > 0 else self._widths[row.narrow_heads :]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Tokens on their way from the device. ``told_R`` and ``scores`` may be read once it has come past them.

    ``tokens_R`` are on the device, for the next step; broken rows have any token.
    """

    rows: Sequence[DrawRow]
    tokens_R: Tensor
    told_R: Tensor
    asked: Sequence[int]
    """Rows whose log-probability is wanted, as in ``scores``."""
    scores: TokenScores | None
    open: _Open | None

    def redrawn(self) -> Drawn:
        """These, or others where a filter turned out not to be decided; ``tokens_R`` are then of no use."""
        return self if self.open is None else self.open.redrawn(self)

    def outcomes(self) -> list[Outcome]:
        """A row without a largest finite logit fails with :class:`InternalError`; the others are not affected."""
        tokens = self.told_R.tolist()
        outcomes = [Outcome(token_id=token) if token >= 0 else Outcome(error=broken_logits()) for token in tokens]
        if self.scores is not None:
            for index, score in zip(self.asked, self.scores.read(), strict=True):
                if tokens[index] >= 0:
                    outcomes[index] = Outcome(token_id=tokens[index], logprob=score)
        return outcomes


@dataclass(frozen=True, slots=True)
class _Open:
    """What it takes to draw once more, where a head of the vocabulary may be too narrow."""

    sampler: Sampler
    logits_RV: Tensor
    """Must not change until then, though the next step is under way."""
    history: History | None
    sampled: Sequence[int]
    decided_S: Tensor

    def redrawn(self, drawn: Drawn) -> Drawn:
        """All draws are keyed, so those that were decided come out the same. The rows' tokens are known by now."""
        while (open_ := drawn.open) is not None and not all(decided := open_.decided_S.tolist()):
            for index, is_decided in zip(open_.sampled, decided, strict=True):
                drawn.rows[index].narrow_heads += not is_decided
            drawn = open_.sampler.draw(self.logits_RV, drawn.rows, self.history)
            Mark(self.logits_RV.device).wait()
        return drawn


def broken_logits() -> RequestError:
    """For a sequence whose hidden states or logits are not finite."""
    return InternalError(
        "The model produced numbers that are not finite for this request.",
        hint="If it repeats, serve the checkpoint with --dtype float32 or bfloat16 and check its files.",
    )


def _pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of ``values``; the tensor itself where that is all of them."""
    return values if len(rows) == values.shape[0] else values[upload(np.array(rows), values.device)]


def _put(values_R: Tensor, rows: Sequence[int], chosen_S: Tensor) -> Tensor:
    """``values_R`` with ``chosen_S`` at ``rows``."""
    if len(rows) == len(values_R):
        return chosen_S
    return values_R.index_copy(0, upload(np.array(rows), values_R.device), chosen_S)
