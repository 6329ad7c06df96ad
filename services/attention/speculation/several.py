"""Several speculators as one: their chains in turn, the likeliest of each first (ExpertFlow, 3.4). Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from services.attention.sequences.plan import Piece
from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.speculator import Chains, Speculator, Wanted


class Several:
    """``speculators``, the best one first: without branches it drafts, and the others only where it has nothing."""

    def __init__(self, speculators: Sequence[Speculator]) -> None:
        self._speculators = speculators

    @property
    def late(self) -> bool:
        return any(each.late for each in self._speculators)

    def may(self, state: SequenceState) -> bool:
        return any(each.may(state) for each in self._speculators)

    def draft(self, wanted: Sequence[Wanted], prompts: Sequence[Piece] = ()) -> list[Chains]:
        """Return of each of ``wanted`` chains that differ: the first of each speculator, then the second of each."""
        drafted = [each.draft(wanted, prompts) for each in self._speculators]
        return [_in_turn(chains, one.branches) for one, chains in zip(wanted, zip(*drafted, strict=True), strict=True)]

    def settle(self, state: SequenceState) -> None:
        for each in self._speculators:
            each.settle(state)

    def forget(self, state: SequenceState) -> None:
        for each in self._speculators:
            each.forget(state)


def _in_turn(chains: Iterable[Chains], count: int) -> Chains:
    """Return at most ``count`` of them, without those that repeat an earlier one."""
    turns = chain.from_iterable(zip_longest(*chains, fillvalue=()))
    found = {tuple(drafts): drafts for drafts in turns if drafts}
    return list(found.values())[:count]
