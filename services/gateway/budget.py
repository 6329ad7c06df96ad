"""What one request may ask for in all: tokens that wait in the queue, and log-probabilities in its answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.errors import InvalidRequest
from services.messages import SCORES_PER_TOKEN, SamplingParams

MAX_SCORES = 4_000_000
"""In one answer. One number takes 8 bytes here, and about 50 as JSON: 32 and 200 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Prompts of these ``lengths``, ``n`` times each. ``echo``: log-probabilities of prompts too, if of any."""

    lengths: Sequence[int]
    n: int
    logprobs: int | None
    echo: bool

    def scores(self, max_tokens: int) -> int:
        """Log-probabilities in the answer, at most. A prompt is scored once, however many choices it has."""
        others = self._scores(max_tokens, 0, echo=False) * (self.n - 1) * len(self.lengths)
        return others + sum(self._scores(max_tokens, length, echo=self.echo) for length in self.lengths)

    def cost(self, max_tokens: int) -> int:
        """Tokens that the queue charges for all sequences together."""
        tokens = self.n * (sum(self.lengths) + len(self.lengths) * max_tokens)
        other = _charged(self._scores(max_tokens, 0, echo=False)) * (self.n - 1) * len(self.lengths)
        firsts = sum(_charged(self._scores(max_tokens, length, echo=self.echo)) for length in self.lengths)
        return tokens + other + firsts

    def _scores(self, max_tokens: int, length: int, *, echo: bool) -> int:
        params = SamplingParams(
            max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=self.logprobs if echo else None
        )
        return params.scores(length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The bounds on one request. ``tokens`` is what the queue holds of all together."""

    tokens: int
    scores: int = MAX_SCORES

    def fits(self, demand: Demand, max_tokens: int) -> bool:
        return demand.scores(max_tokens) <= self.scores and demand.cost(max_tokens) <= self.tokens

    def check(self, demand: Demand, max_tokens: int) -> None:
        """Raises InvalidRequest for what could never be served."""
        scores, cost = demand.scores(max_tokens), demand.cost(max_tokens)
        if scores > self.scores:
            raise InvalidRequest(
                f"The answer would have {scores} log-probabilities; {self.scores} is the most.",
                hint="Lower logprobs, max_tokens or n, or send fewer or shorter prompts.",
                param="logprobs",
            )
        if cost > self.tokens:
            raise InvalidRequest(
                f"The request needs {cost} tokens (prompts and max_tokens, times n); the queue holds {self.tokens}.",
                hint="Lower max_tokens or n, send fewer prompts, or raise --max-queued-tokens.",
                param="max_tokens",
            )

    def most_tokens(self, demand: Demand, room: int) -> int:
        """The largest ``max_tokens`` up to ``room`` that fits; 1 where none does, so that the check names it."""
        fewest, most = 1, max(1, room)
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self.fits(demand, middle):
                fewest = middle
            else:
                most = middle - 1
        return fewest


def _charged(scores: int) -> int:
    return -(-scores // SCORES_PER_TOKEN)
