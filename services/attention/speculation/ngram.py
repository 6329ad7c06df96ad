"""Drafts from the sequence itself: what followed the same tokens earlier in prompt or answer (prompt lookup).

Each sequence has an index of its own, which grows with it: a token costs the same however long the sequence is. As in
LZ77, places that begin alike are chained, the latest first, and a few of them are compared. Pure Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.speculator import OneByOne
from services.config.speculation import SpeculativeConfig

_PLACES = 8
"""Earlier places that are compared."""
_TOKENS_AT_ONCE = 1024
"""Most tokens of a sequence that are indexed in a step, so that a long prompt does not hold up the others."""
_NONE = -1


class NgramIndex:
    """Where tokens occurred in one sequence: the ends of all n-grams of ``shortest`` tokens.

    Args:
        longest: most tokens in which places are compared.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._latest: dict[int, int] = {}
        """Hash of an n-gram -> the end of its latest occurrence. Two n-grams with one hash cost a comparison."""
        self._before = array("q", [_NONE])
        """For each length of the sequence: an earlier end with the same hash."""

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Take in what is new of ``token_ids``, which only grow. Returns whether nothing is left."""
        first = len(self._before)
        last = min(len(token_ids), first - 1 + _TOKENS_AT_ONCE)
        for end in range(first, last + 1):
            if end < self._shortest:
                self._before.append(_NONE)
                continue
            ngram = hash(tuple(token_ids[end - self._shortest : end]))
            self._before.append(self._latest.get(ngram, _NONE))
            self._latest[ngram] = end
        return last == len(token_ids)

    def places(self, token_ids: Sequence[int], most: int = 1) -> list[int]:
        """Return the ends of earlier places that agree with the end of ``token_ids``: the best ones first, the latest
        of equals.

        Args:
            most: as many times more places are compared.
        """
        found = list[tuple[int, int]]()
        end, left = self._before[len(token_ids)], _PLACES * most
        while end != _NONE and left and not (most == 1 and found and found[-1][0] == self._longest):
            if (count := self._agreement(token_ids, end)) >= self._shortest:
                found.append((count, end))
            end, left = self._before[end], left - 1
        return [end for _, end in sorted(found, reverse=True)]

    def _agreement(self, token_ids: Sequence[int], end: int) -> int:
        """Return in how many tokens the sequence up to ``end`` ends like the whole."""
        count, most, whole = 0, min(self._longest, end), len(token_ids)
        while count < most and token_ids[end - 1 - count] == token_ids[whole - 1 - count]:
            count += 1
        return count


class NgramSpeculator(OneByOne):
    """Drafts for sequences by an index of each."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest, self._longest = config.shortest, config.longest
        self._indices: dict[SequenceState, NgramIndex] = {}

    def drafts(self, state: SequenceState, most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow; none if nothing like the end occurred before."""
        return next(iter(self.chains(state, most, 1)), [])

    def chains(self, state: SequenceState, most: int, count: int) -> list[list[int]]:
        """Return what followed at the best places: at most ``count`` chains that differ."""
        token_ids = state.token_ids
        index = self._indices.get(state)
        if index is None:
            index = self._indices[state] = NgramIndex(self._shortest, self._longest)
        chains = list[list[int]]()
        for place in index.places(token_ids, count) if index.follow(token_ids) else ():
            if (chain := _continued(token_ids, place, most)) not in chains:
                chains.append(chain)
            if len(chains) == count:
                break
        return chains

    def forget(self, state: SequenceState) -> None:
        """Drop the index of ``state``, which has ended or waits again."""
        self._indices.pop(state, None)


def _continued(token_ids: list[int], place: int, most: int) -> list[int]:
    """Return the ``most`` tokens behind ``place``; where it reaches the end, what comes after it repeats."""
    drafts, period = token_ids[place : place + most], len(token_ids) - place
    while len(drafts) < most:
        drafts.append(drafts[-period])
    return drafts
