"""Messages about shared memory on a seat's connection. Rows and answers themselves never come this way."""

from __future__ import annotations

from typing import Annotated

import msgspec

from services.fabric.tcp.frames import Message

MAX_ROWS = 1 << 16
MAX_EXCHANGES = 1 << 62
"""The number of an exchange fits into a word of 64 bits."""
Positive = Annotated[int, msgspec.Meta(ge=1)]


class ShareRequest(Message, frozen=True, kw_only=True):
    """The attention worker offers memory for answers, by its encoded handle, and asks for memory for rows.

    ``rows`` is the largest number of rows of a micro-batch. ``unsummed`` asks for one answer per pair of a row and a
    slot instead of one per row.
    """

    handle: bytes
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    micro_batches: Annotated[int, msgspec.Meta(ge=1, le=8)]
    unsummed: bool


class ShareReply(Message, frozen=True, kw_only=True):
    """The expert worker gives memory for rows after it has prepared steps, or says by ``problem`` why rows stay on tcp.

    ``place`` is the number of this client among the seat's clients, which is free again when the client has left. A
    ``colocated`` seat shares its GPU with attention, whose prompts may make answers late.
    """

    handle: bytes = b""
    place: int = -1
    colocated: bool = False
    problem: str = ""


class Step(Message, frozen=True, kw_only=True):
    """The attention worker begins a step of ``micro_batches`` with up to ``bucket`` rows each.

    Its exchanges are numbered from ``base`` + 1 on, layer by layer and within a layer by micro-batch; each waits for
    ``deadline_s`` at most. Of a ``whole`` step all rows go through shared memory, so that no layer waits for tcp.
    ``epoch`` and ``step`` only name the step.
    """

    epoch: int
    step: int
    base: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXCHANGES)]
    bucket: Positive
    micro_batches: Positive
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    whole: bool = False


class Stop(Message, frozen=True, kw_only=True):
    """The attention worker sends no more rows of the step that it began last, which has failed."""


def bucket_of(rows: int, largest: int) -> int:
    """Round ``rows`` up to what seats prepare for: a power of two from 8 on, but at most ``largest``."""
    return next((bucket for bucket in buckets(largest) if bucket >= rows), largest)


def buckets(largest: int) -> list[int]:
    """Return all values of :func:`bucket_of`, ascending."""
    found = [min(8, largest)]
    while found[-1] < largest:
        found.append(min(2 * found[-1], largest))
    return found
