"""The sampler: logits of one step in, one drawn token per row out.

A row's logits pass, in this order: repetition penalty (over prompt and generated tokens), frequency and presence
penalty (generated tokens), logit_bias, the ban of end tokens before ``min_tokens``, temperature, top_k, top_p (of the
tokens that top_k keeps, renormalised), min_p; then the Gumbel-max draw of :mod:`services.attention.sampling.noise`.
Every filter is a threshold on the logit, so tokens that tie with the last one kept are kept too, and the result does
not depend on a sort. Log-probabilities are those of the model's own distribution, before any of this.

Every operation treats each row alike and by itself: a draw never depends on the batch.
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
"""The lowest temperature above 0. Lower ones count as this one, so that differences of logits still fit float32."""
_BROKEN = -1
"""Stands for the token of a row without finite logits."""


class Sampler:
    """Draws tokens over a vocabulary of ``vocab_size`` on ``device``. No draw depends on those before it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise, self._edits = GumbelNoise(vocab_size, device), Edits(vocab_size, device)
        widths = heads(vocab_size)
        # Drawing again is cheap only where nothing was launched meanwhile; elsewhere a wide head at once costs less.
        starts_wide = device.type != "cpu" and len(widths) > 2
        self._widths, self._every_width = widths[1:] if starts_wide else widths, widths

    def draw(
        self, logits_RV: Tensor, rows: Sequence[DrawRow], history: History | None = None, *, ahead: int = 0
    ) -> Drawn:
        """Draw one token per row of ``logits_RV`` (float32, not changed); ties go to the lowest id. Does not wait.

        Args:
            history: earlier tokens of the rows that look back, in their order; None if no row does.
            ahead: of how many of ``rows``, the first ones, ``history`` has a token that they do not know.
        """
        edited_RV = self._edits.of(logits_RV, rows, history, ahead)
        best_R, tokens_R = edited_RV.max(dim=-1)  # NaN counts as the largest, and the first of equals wins
        sampled, decided_S = [index for index, row in enumerate(rows) if row.samples], None
        if sampled:
            chosen_S, decided_S = self._sample(
                _pick(edited_RV, sampled),
                _pick(best_R, sampled),
                [rows[index] for index in sampled],
                [rows[index].position(index < ahead) for index in sampled],
            )
            tokens_R = _put(tokens_R, sampled, chosen_S)
        asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        alternatives = [rows[index].params.logprobs or 0 for index in asked]
        return Drawn(
            rows=rows,
            tokens_R=tokens_R,
            host_R=download(torch.where(best_R.isfinite(), tokens_R, _BROKEN)),
            asked=asked,
            scores=TokenScores(_pick(logits_RV, asked), _pick(tokens_R, asked), alternatives) if asked else None,
            open=None if decided_S is None else _Open(self, logits_RV, history, sampled, download(decided_S)),
        )

    def _sample(
        self, logits_SV: Tensor, best_S: Tensor, rows: Sequence[DrawRow], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Draw token ids [S] for these positions from logits whose largest is ``best_S``. Returns also which rows'
        filters are decided; None: all. Where ``best_S`` is not finite the token means nothing."""
        temperatures = [max(row.params.temperature, MIN_TEMPERATURE) for row in rows]
        temperatures_S1 = upload(np.array(temperatures, dtype=np.float32), logits_SV.device)[:, None]
        # With the largest at 0, a division by a tiny temperature can only underflow to -inf, which is never drawn.
        scaled_SV, decided_S = logits_SV.sub(best_S[:, None]).div_(temperatures_S1), None
        if any(row.filters for row in rows):
            widths = [width(row.params, self._widths_of(row)) for row in rows]
            floors_S, decided_S = thresholds(scaled_SV, [row.params for row in rows], widths)
            scaled_SV.masked_fill_(scaled_SV < floors_S[:, None], -torch.inf)
        keys = draw_keys([row.key for row in rows], positions)
        return scaled_SV.add_(self._noise.rows(keys)).argmax(dim=-1), decided_S

    def _widths_of(self, row: DrawRow) -> Sequence[int]:
        """Return the widths of heads to try for ``row``. With a top_k the first one that holds it decides."""
        return self._every_width if row.params.top_k > 0 else self._widths[row.narrow_heads :]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Tokens on their way from the device. ``tokens_R`` stay there, for the next step; ``host_R`` and ``scores`` may be
    read once the device has computed them. In ``tokens_R`` a broken row has any token, in ``host_R`` a negative one."""

    rows: Sequence[DrawRow]
    tokens_R: Tensor
    host_R: Tensor
    asked: Sequence[int]
    """Rows whose log-probability is wanted, in the order of ``scores``."""
    scores: TokenScores | None
    open: _Open | None

    def redrawn(self) -> Drawn:
        """Draw again if a filter turned out undecided: then ``tokens_R`` here are wrong. Else return ``self``."""
        return self if self.open is None else self.open.redrawn(self)

    def outcomes(self) -> list[Outcome]:
        """Return one outcome per row. A row whose largest logit is not finite fails with InternalError, by itself."""
        tokens = self.host_R.tolist()
        outcomes = [Outcome(token_id=token) if token >= 0 else Outcome(error=broken_logits()) for token in tokens]
        if self.scores is not None:
            for index, score in zip(self.asked, self.scores.read(), strict=True):
                if tokens[index] >= 0:
                    outcomes[index] = Outcome(token_id=tokens[index], logprob=score)
        return outcomes


@dataclass(frozen=True, slots=True)
class _Open:
    """Draws again where a head of the vocabulary turns out to be too narrow for a row's filters."""

    sampler: Sampler
    logits_RV: Tensor
    """Logits of the first draw, which must not change while the next step is in flight."""
    history: History | None
    sampled: Sequence[int]
    decided_S: Tensor

    def redrawn(self, drawn: Drawn) -> Drawn:
        """Draw all rows again. Draws are keyed: decided ones come out the same. The rows know their tokens by now."""
        while (open_ := drawn.open) is not None and not all(decided := open_.decided_S.tolist()):
            for index, is_decided in zip(open_.sampled, decided, strict=True):
                drawn.rows[index].narrow_heads += not is_decided
            drawn = open_.sampler.draw(self.logits_RV, drawn.rows, self.history)
            Mark(self.logits_RV.device).wait()
        return drawn


def broken_logits() -> RequestError:
    """Return the error of a sequence whose hidden states or logits are not finite."""
    return InternalError(
        "The model produced NaN or infinity for this request.",
        hint="If this repeats, serve the checkpoint with --dtype float32 or bfloat16, and check its files.",
    )


def _pick(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the rows ``rows`` of ``values``; the tensor itself if these are all."""
    return values if len(rows) == values.shape[0] else values[upload(np.array(rows), values.device)]


def _put(values_R: Tensor, rows: Sequence[int], chosen_S: Tensor) -> Tensor:
    """Return ``values_R`` with ``chosen_S`` at ``rows``."""
    if len(rows) == len(values_R):
        return chosen_S
    return values_R.index_copy(0, upload(np.array(rows), values_R.device), chosen_S)
