"""The prefix cache as sequences use it: which blocks they may share, and which of theirs others may. Pure Python."""

from __future__ import annotations

from services.attention.batching.blocks import BlockPool
from services.attention.sequences.sequence import SequenceState
from services.prefix import PrefixScope


class Prefixes:
    """Over a :class:`BlockPool`, which knows blocks by name; does nothing unless ``enabled``. ``scope``: who shares."""

    def __init__(self, pool: BlockPool, *, enabled: bool, scope: PrefixScope) -> None:
        self._pool = pool
        self._enabled = enabled
        self._scope = scope

    def looks_up(self, state: SequenceState) -> bool:
        # Scoring the prompt needs a row for each of its tokens, so nothing may be skipped.
        return self._enabled and state.scored is None

    def match(self, state: SequenceState) -> list[int]:
        """Cached blocks of the sequence. The last known token is always recomputed: its row is what a draw needs."""
        if not self.looks_up(state):
            return []
        blocks = (len(state.token_ids) - 1) // self._pool.block_size
        return self._pool.match(state.extend_chain(self._pool.block_size, blocks, self._scope))

    def publish(self, state: SequenceState) -> None:
        """Let others find the blocks that ``state`` has filled."""
        block_size = self._pool.block_size
        full = state.computed // block_size
        if full == state.published or not self._enabled:
            return
        chain = state.extend_chain(block_size, full, self._scope)
        for index in range(state.published, full):
            self._pool.publish(state.blocks[index], chain[index])
        state.published = full
