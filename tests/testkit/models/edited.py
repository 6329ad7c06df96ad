"""Edits of logits by their definition: one row after the other, in numpy, from the list of all its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.attention.sampling.edits import Edits
from services.attention.sampling.histories import History
from services.attention.sequences.plan import StepPlan
from services.attention.sequences.sequence import DrawRow
from services.attention.step.engine import Engine


def edited(logits_V: NDArray[np.float32], row: DrawRow, tokens: Sequence[int]) -> NDArray[np.float32]:
    """``logits_V`` for the draw after ``tokens``."""
    params, logits_V = row.params, logits_V.copy()
    factor = np.float32(params.repetition_penalty)
    for token in set(tokens):
        logits_V[token] = logits_V[token] / factor if logits_V[token] > 0 else logits_V[token] * factor
    for token, times in Counter(tokens[row.prompt_len :]).items():
        logits_V[token] -= np.float32(params.presence_penalty + params.frequency_penalty * times)
    for token, bias in params.logit_bias.items():
        logits_V[token] += np.float32(bias)
    if len(tokens) - row.prompt_len < params.min_tokens:
        logits_V[[token for token in row.stop_ids if token < len(logits_V)]] = -np.inf
    return logits_V


class WatchedEdits(Edits):
    """In place of an engine's own; notes draws whose logits are not as they should be, to the bit."""

    def __init__(self, engine: Engine[Any], vocab_size: int) -> None:
        super().__init__(vocab_size, engine._device)
        self.wrong: list[tuple[str, Sequence[int]]] = []
        self.draws, self.ahead = 0, 0
        """Of rows that look back; and of these, after a token that the host did not know."""
        self._after: list[int] = []
        self._flatten = engine._inputs.of
        engine._inputs.of = self._noting  # type: ignore[method-assign]
        engine._sampler._edits = self

    def of(self, logits_RV: Tensor, rows: Sequence[DrawRow], history: History | None, ahead: int) -> Tensor:
        edited_RV = super().of(logits_RV, rows, history, ahead)
        for number, row in enumerate(rows):
            unknown = number < ahead
            tokens = [*row.token_ids, *self._after[number : number + unknown]]
            wanted_V = edited(logits_RV[number].numpy(), row, tokens)
            if wanted_V.tobytes() != edited_RV[number].numpy().tobytes():
                self.wrong.append((f"{row.params}, {unknown} ahead", tokens))
            self.draws += row.looks_back
            self.ahead += row.looks_back and unknown
        return edited_RV

    def _noting(self, plan: StepPlan, after_B: Tensor | None = None) -> Any:
        self._after = [] if after_B is None else after_B.tolist()
        return self._flatten(plan, after_B)
