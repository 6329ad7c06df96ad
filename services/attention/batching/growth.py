"""Room for running sequences to grow in the KV pool. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from services.attention.batching.blocks import BlockPool
from services.attention.sequences.sequence import SequenceState


def make_room(pool: BlockPool, decodes: Sequence[SequenceState], ahead: int) -> bool:
    """Give each of ``decodes`` a block for the token drawn last, or ``ahead`` after it, where it is the first in one.

    They have room for all before it. False, and no blocks, if there are too few. Asking twice takes nothing more.
    """
    size = pool.block_size
    at_edge = [state for state in decodes if not (len(state.token_ids) - 1 + ahead) % size]
    growing = [state for state in at_edge if len(state.blocks) * size < len(state.token_ids) + ahead]
    if len(growing) > pool.available:
        return False
    for state in growing:
        state.blocks += pool.take((), 1)
    return True


def reserve(pool: BlockPool, running: Sequence[SequenceState]) -> int:
    """Blocks kept for ``running`` to grow by one each; without them an admission could preempt at once."""
    return sum(state.limit > len(state.blocks) * pool.block_size for state in running)
