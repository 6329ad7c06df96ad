"""Knows which KV blocks the draft model's cache holds, by the names of their contents. Pure Python.

Both caches have the same blocks, and the pool names what the target has computed. The draft model may have computed
less of a sequence, or another one's tokens in the same block before: what it has of a block is known by the name that
the block had when the last of its tokens was computed here (:mod:`services.prefix`), until something else is written.
"""

from __future__ import annotations

from services.attention.sequences.sequence import SequenceState
from services.prefix import PrefixScope


class Coverage:
    """The blocks of one draft model's cache. Without the prefix cache no block comes to a second sequence."""

    def __init__(self, block_size: int, *, prefix_cache: bool, scope: PrefixScope) -> None:
        self._size, self._enabled, self._scope = block_size, prefix_cache, scope
        self._name_of: dict[int, bytes] = {}

    def tokens(self, state: SequenceState) -> int:
        """Return of how many leading tokens of ``state``, in whole blocks, keys and values are there."""
        names = self._names(state, len(state.token_ids) - 1)
        known = 0
        while known < min(len(names), len(state.blocks)) and self._name_of.get(state.blocks[known]) == names[known]:
            known += 1
        return known * self._size

    def writes(self, state: SequenceState, start: int, end: int) -> None:
        """Note that positions ``start .. end`` of ``state`` are about to be written."""
        for block in state.blocks[start // self._size : -(-end // self._size)] if self._enabled else ():
            self._name_of.pop(block, None)

    def computed(self, state: SequenceState, start: int, end: int) -> None:
        """Note that keys and values of the first ``end`` tokens of ``state`` are there; of ``start`` that is known."""
        first = start // self._size
        for number, name in enumerate(self._names(state, end)[first:], start=first):
            self._name_of[state.blocks[number]] = name

    def _names(self, state: SequenceState, tokens: int) -> list[bytes]:
        return state.extend_chain(self._size, tokens // self._size, self._scope) if self._enabled else []
