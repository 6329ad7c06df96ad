"""Messages about shared memory on a seat's connection. Rows and answers themselves never come this way."""

from __future__ import annotations

from typing import Annotated

import msgspec

from services.fabric.tcp.frames import Message

MAX_ROWS = 1 << 16
MAX_EXCHANGES = 1 << 62
"""Numbers of exchanges, as those of nanoseconds, fit into a word of 64 bits."""
Positive = Annotated[int, msgspec.Meta(ge=1)]


class ShareRequest(Message, frozen=True, kw_only=True):
    """Attention: here is memory for answers; let me have some for rows. ``rows``: most rows of a micro-batch."""

    ticket: bytes
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    micro_batches: Annotated[int, msgspec.Meta(ge=1, le=8)]
    unsummed: bool


class ShareReply(Message, frozen=True, kw_only=True):
    """Experts: the memory for rows, prepared for steps; ``place``, free again when its client has left, tells attention
    workers of a seat apart; ``beside`` attention, whose prompts may make it late. Or the ``problem`` that keeps rows on
    tcp."""

    ticket: bytes = b""
    place: int = -1
    beside: bool = False
    problem: str = ""


class Step(Message, frozen=True, kw_only=True):
    """Attention: a step begins, in ``micro_batches`` of up to ``bucket`` rows each. Its exchanges, layer by layer and
    within a layer by micro-batch, are numbered from ``base`` + 1 on. ``epoch`` and ``step`` only name it.

    ``deadline_s``: longest wait for one exchange. ``whole``: all rows of the step go through shared memory, so that no
    layer waits for anything slower.
    """

    epoch: int
    step: int
    base: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXCHANGES)]
    bucket: Positive
    micro_batches: Positive
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    whole: bool = False


class Stop(Message, frozen=True, kw_only=True):
    """Attention: no more rows come of the step begun last, which has failed. Another one need not follow."""


def bucket_of(rows: int, most: int) -> int:
    """``rows`` rounded up to what seats prepare for: powers of two from 8 on, at most ``most``."""
    bucket = 8
    while bucket < rows:
        bucket *= 2
    return min(bucket, most)


def buckets(most: int) -> list[int]:
    """All values of :func:`bucket_of`, ascending."""
    found = [min(8, most)]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found
