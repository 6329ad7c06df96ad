"""Several speculators as one: their chains in turn, the likeliest of each first (ExpertFlow, 3.4). Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.drafting import Speculator


class Several:
    """``speculators``, the best one first: without branches it drafts, and the others only where it has nothing."""

    def __init__(self, speculators: Sequence[Speculator]) -> None:
        self._speculators = speculators

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        """Return the drafts of the first speculator that has some."""
        found = (each.drafts(state, most) for each in self._speculators)
        return next((drafts for drafts in found if drafts), ())

    def chains(self, state: SequenceState, most: int, count: int) -> list[Sequence[int]]:
        """Return at most ``count`` chains that differ: the first of each speculator, then the second of each."""
        turns = zip_longest(*(each.chains(state, most, count) for each in self._speculators), fillvalue=())
        found = {tuple(drafts): drafts for drafts in chain.from_iterable(turns) if drafts}
        return list(found.values())[:count]

    def forget(self, state: SequenceState) -> None:
        """Drop what each keeps for ``state``."""
        for each in self._speculators:
            each.forget(state)
