"""Engines whose drafts are known to be right or wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.drafting import Drafting
from services.attention.speculation.gate import NONE, Amount, Gate
from services.attention.speculation.speculator import OneByOne
from services.attention.step.engine import Engine
from testkit.models.plots import FATAL, NAN, VOCAB, Story

Truth = dict[str, list[int]]


class Always(Gate):
    """Does not measure."""

    def amount(self, sequences: int) -> Amount:
        return self._amounts[-1] if sequences else NONE

    known_amount = amount


class Knowing(OneByOne):
    """Knows what is drawn, and says something else now and then: a token that breaks its row or the step, too."""

    def __init__(self, truth: Truth, seed: int, wrong: float, *, breaks: bool = True) -> None:
        self._truth, self._draw, self._wrong, self._breaks = truth, random.Random(seed), wrong, breaks
        self.forgotten: list[str] = []

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        rest = self._truth.get(state.request.id, [])[state.generated :]
        return [self._said(token) for token in rest[: self._draw.randrange(most + 1)]]

    def chains(self, state: SequenceState, most: int, count: int) -> Sequence[Sequence[int]]:
        """What is drawn, and others that begin like it, in any order."""
        if count == 1:
            return [self.drafts(state, most)]
        rest = self._truth.get(state.request.id, [])[state.generated :][: self._draw.randrange(most + 1)]
        chains = [[self._said(token) for token in rest]]
        for _ in range(self._draw.randrange(count)):
            common = self._draw.randrange(len(rest) + 1)
            chains.append([*rest[:common], *(self._draw.randrange(VOCAB) for _ in range(most - common))])
        self._draw.shuffle(chains)
        return chains

    def _said(self, token: int) -> int:
        other = self._draw.randrange(VOCAB)
        wrong = self._draw.choice((NAN, FATAL, other)) if self._breaks else other
        return wrong if self._draw.random() < self._wrong else token

    def forget(self, state: SequenceState) -> None:
        self.forgotten.append(state.request.id)


class DraftingEngine(Engine[Any]):
    """With a speculator of the test's, and a gate that is open."""

    def __init__(self, speculator: Any, depth: int, branches: int = 1, **parts: Any) -> None:
        self._speculator, self._depth, self._branches = speculator, depth, branches
        super().__init__(clock=lambda: 0, **parts)
        self.prepare()

    def _new_drafting(self) -> Drafting | None:
        return Drafting(self._speculator, Always(self._depth, self._branches), self._pool)


def truth_of(story: Story) -> Truth:
    return {name: [event[2] for event in events if event[2] is not None] for name, events in story.items()}


class Same(OneByOne):
    """Drafts the same chains for all."""

    def __init__(self, chains: Sequence[Sequence[int]]) -> None:
        self._chains = chains

    def chains(self, state: SequenceState, most: int, count: int) -> Sequence[Sequence[int]]:  # noqa: ARG002
        return [chain[:most] for chain in self._chains[:count]]

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:  # noqa: ARG002
        return self._chains[0][:most]

    def forget(self, state: SequenceState) -> None:
        pass
