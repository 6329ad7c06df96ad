"""Requests cut into calls that hold nobody up for long, and as the script takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.queue.prompts import Stored
from services.queue.scripts import Argument

PIECE_REQUESTS = 100
PIECE_BYTES = 1 << 20
"""Of one call, during which Redis serves nobody else."""


def pieces(requests: Iterable[Stored]) -> Iterator[list[Stored]]:
    """In their order, so many at a time as one call may carry, but one at least."""
    piece: list[Stored] = []
    size, named = 0, set[str]()
    for stored in requests:
        added = len(stored.body) + (0 if stored.name in named else len(stored.ids))
        if piece and (size + added > PIECE_BYTES or len(piece) == PIECE_REQUESTS):
            yield piece
            piece, size, named, added = [], 0, set(), stored.nbytes
        piece.append(stored)
        size += added
        named.add(stored.name)
    yield piece


def items(piece: Sequence[Stored]) -> Iterator[Argument]:
    """As ``admit.lua`` takes them; a prompt's ids with the first request that has it."""
    sent = {""}
    for stored in piece:
        request = stored.request
        yield from (request.id, request.priority, request.cost, request.sampling.max_tokens, request.delivered)
        yield from (stored.body, stored.name, b"" if stored.name in sent else stored.ids)
        sent.add(stored.name)
