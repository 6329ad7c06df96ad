"""Versions of what processes write to one another through Redis, and reading it: whatever the bytes, a typed error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from services.errors import UnreadableMessage

WIRE = 2
"""The version of what this release writes where all readers know it. 1: no version is told; a request's record and its
Assign hold the prompt; the scores of an echoed prompt come with its first token. 2: a prompt is stored once and named,
its scores come in :class:`PromptScores`."""
APART = 2
"""Version from which on a request may name its prompt, and scores of prompts come apart from the first token."""
OLDEST_WIRE = 1
"""The oldest version that this release reads, and writes for those who know no other."""
NO_PROMPT = "The prompt is empty."
"""How a worker refuses a request without a prompt. To one of version 1 each that names its prompt is such a request."""

T = TypeVar("T")


def read(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """Raises UnreadableMessage, which calls it ``what``."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableMessage(f"{what} of {len(data)} bytes cannot be read: {error}.") from error
