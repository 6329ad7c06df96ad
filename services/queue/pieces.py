"""Requests cut into calls that hold nobody up for long, and as the scripts take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from services.queue.prompts import Stored
from services.queue.scripts import CHUNK, Argument

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


def parts(rows: Iterable[tuple[Argument, ...]]) -> Iterator[list[tuple[Argument, ...]]]:
    """Arguments by request, likewise. ``rows`` may be made as they are asked for: no more than one call's are kept."""
    part: list[tuple[Argument, ...]] = []
    size = 0
    for row in rows:
        added = sum(len(value) for value in row if isinstance(value, bytes))
        if part and (size + added > PIECE_BYTES or len(part) == CHUNK):
            yield part
            part, size = [], 0
        part.append(row)
        size += added
    if part:
        yield part


def items(piece: Sequence[Stored]) -> Iterator[Argument]:
    """As ``admit.lua`` takes them; a prompt's ids with the first request that has it."""
    sent = {""}
    for stored in piece:
        request = stored.request
        yield from (request.id, request.priority, request.cost, request.sampling.max_tokens, request.delivered)
        yield from (stored.body, stored.name, b"" if stored.name in sent else stored.ids)
        sent.add(stored.name)
