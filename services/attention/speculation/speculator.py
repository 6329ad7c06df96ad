"""The seam between an engine and what drafts for it: sequences go in, tokens that may follow them come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.attention.sequences.plan import Piece
from services.attention.sequences.sequence import SequenceState

Chains = Sequence[Sequence[int]]
"""What may follow one sequence, the likeliest first; they differ."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """At most ``branches`` chains of at most ``most`` drafts are wanted of ``state``, which has KV blocks for its known
    tokens and for one of them."""

    state: SequenceState
    most: int
    branches: int = 1


class Speculator(Protocol):
    """Guesses what follows. Nothing depends on its guesses but time."""

    @property
    def late(self) -> bool:
        """Whether the last :meth:`draft` had to take in much that others know already: its time says nothing."""
        ...

    def may(self, state: SequenceState) -> bool:
        """Return whether ``state`` may get drafts. Where nothing may, the next step can be launched ahead."""
        ...

    def draft(self, wanted: Sequence[Wanted], prompts: Sequence[Piece] = ()) -> list[Chains]:
        """Return chains that may follow the known tokens of each of ``wanted``, in their order; () where it has none.

        Args:
            prompts: what the same step computes of prompts; whoever reads prompts may do so now.
        """
        ...

    def settle(self, state: SequenceState) -> None:
        """Compare what is kept for ``state`` with its tokens now: it is about to lose the blocks behind them."""
        ...

    def forget(self, state: SequenceState) -> None:
        """Drop what is kept for ``state``, which has ended or waits again."""
        ...


class OneByOne:
    """Base class of speculators that look at each sequence by itself and do without the device."""

    late = False

    def may(self, state: SequenceState) -> bool:
        return bool(self.drafts(state, 1))

    def draft(self, wanted: Sequence[Wanted], prompts: Sequence[Piece] = ()) -> list[Chains]:
        del prompts
        return [self.chains(one.state, one.most, one.branches) for one in wanted]

    def chains(self, state: SequenceState, most: int, count: int) -> Chains:
        """Return at most ``count`` chains of such tokens that differ, the likeliest first: one, unless overridden."""
        del count
        return [drafts] if (drafts := self.drafts(state, most)) else []

    def settle(self, state: SequenceState) -> None:
        """Nothing of it is in blocks."""

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may follow the known ones of ``state``."""
        raise NotImplementedError


class Drafter(Protocol):
    """Makes speculators that need weights and a cache, for one engine."""

    failures: Counter[str]
    """What ended drafting, by reason. Answers go on without."""

    def speculator(self) -> Speculator:
        """Return one that knows of no sequence. Only the newest may be used."""
        ...

    def prepare(self) -> None:
        """Capture CUDA graphs, if it uses them. Raises ConfigError: memory does not suffice."""
        ...

    def free(self) -> None:
        """Give the memory of cache and graphs back, until :meth:`allocate`."""
        ...

    def allocate(self) -> None:
        """Take the memory again. Raises OutOfMemory."""
        ...
