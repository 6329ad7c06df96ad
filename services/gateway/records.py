"""Tokens and their log-probabilities as a gateway keeps them: growing arrays, four or eight bytes a number.

In: numbers from events, in the order of tokens. Out: one token at a time, as :class:`Record`, to be formatted.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import NamedTuple

from services.messages import PromptScores, TokenLogprob
from services.queue.prompts import unpack_ids

NOTHING = math.nan
"""Stands for a log-probability that is not known."""


class Record(NamedTuple):
    """One token, as log-probabilities and ``token_ids`` show it. ``offset`` counts characters of the choice's text."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int


class Scores:
    """Log-probabilities of tokens, each with its alternatives."""

    def __init__(self) -> None:
        self._own = array("f")
        self._ends = array("q")  # where each token's alternatives end
        self._ids = array("i")
        self._values = array("f")

    def __len__(self) -> int:
        return len(self._own)

    @property
    def nbytes(self) -> int:
        return 12 * len(self._own) + 8 * len(self._ids)

    def add(self, score: TokenLogprob | None) -> None:
        """Adds the score of the next token; None where it has none."""
        self._own.append(NOTHING if score is None else score.logprob)
        for token_id, logprob in () if score is None else score.top:
            self._ids.append(token_id)
            self._values.append(logprob)
        self._ends.append(len(self._ids))

    def extend(self, scores: PromptScores) -> None:
        """Adds the scores of the next tokens."""
        self._own.extend(_floats(scores.logprobs))
        first = self._ends[-1] if self._ends else 0
        self._ids.extend(unpack_ids(scores.top_ids))
        self._values.extend(_floats(scores.top_logprobs))
        self._ends.extend(first + scores.width * (row + 1) for row in range(len(scores)))

    def at(self, index: int) -> TokenLogprob | None:
        own = self._own[index]
        if math.isnan(own):
            return None
        part = slice(self._ends[index - 1] if index else 0, self._ends[index])
        return TokenLogprob(own, list(zip(self._ids[part], self._values[part], strict=True)))


def _floats(data: bytes) -> array[float]:
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
