"""What is measured, this project's engine or vLLM's, behind one interface: batches go in, times and counts come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.errors import BenchFailed

OURS, VLLM = "expertmesh", "vLLM"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Prompts as token ids, and how long each of their answers is, all at once."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[int]

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.answers)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt) + answer for prompt, answer in zip(self.prompts, self.answers, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """``seconds`` from the first step to the last. Where a side says more: ``decode_s`` are the steps that did nothing
    but decode all sequences of the batch, ``finished_s`` the moments at which requests ended, ``preemptions`` how often
    one was put out for others and computed again."""

    seconds: float
    tokens: Sequence[int]
    decode_s: Sequence[float] = ()
    finished_s: Sequence[float] = ()
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a side can hold at a time."""

    max_num_seqs: int
    max_model_len: int
    kv_tokens: int


class Side(Protocol):
    """One of the two that are compared."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Versions, and the settings that it runs with."""

    def run(self, batch: Batch, on_finished: Callable[[int], None]) -> Timed:
        """Serves ``batch``. ``on_finished`` gets the number of requests that have ended, now and then."""

    def close(self) -> None:
        """Gives back what it holds."""


def checked(side: str, batch: Batch, timed: Timed) -> Timed:
    """Returns ``timed`` if each answer is as long as it was asked for.

    Raises:
        BenchFailed: one is not.
    """
    for number, (asked, found) in enumerate(zip(batch.answers, timed.tokens, strict=True)):
        if asked != found:
            raise BenchFailed(f"{side}: answer {number} has {found} tokens, and {asked} were asked for.")
    return timed
