"""The version of messages in Redis, and how to read them: any bytes that are no message give a typed error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from services.errors import UnreadableMessage

WIRE = 2
"""The version that this release writes where all readers know it. Version 1: a message has no version; a request's
record and its Assign hold the prompt; the scores of an echoed prompt come with its first token. Version 2: a prompt is
stored once and requests name it; its scores come in :class:`PromptScores`."""
NAMED_PROMPTS = 2
"""The version from which on a request may name its prompt, and scores of prompts come before the first token."""
OLDEST_WIRE = 1
"""The oldest version that this release reads, and writes for readers that know no other."""
NO_PROMPT = "The prompt is empty."
"""The text with which a worker refuses a request without a prompt. One of version 1 finds no prompt in a named one."""
_DENSE = "dense"

T = TypeVar("T")


def read(decoder: msgspec.msgpack.Decoder[T], what: str, data: bytes) -> T:
    """Decode ``data``. Raises UnreadableMessage, which calls the data ``what``."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnreadableMessage(f"{what} of {len(data)} bytes cannot be read: {error}.") from error


def with_label(weights: str, experts: str, linears: str = "") -> str:
    """Return the hash of a model's weights with how experts and other linear layers are held, as workers know of one
    another. Dense ones, as all were in the release before, have no label.

    >>> with_label("9f", "int4-g128"), with_label("9f", ""), with_label("9f", "", "fp8-128x128")
    ('9f+int4-g128', '9f', '9f+dense+fp8-128x128')
    """
    label = f"{experts or _DENSE}+{linears}" if linears else experts
    return f"{weights}+{label}" if label else weights


def format_of(weights: str) -> str:
    """Return how weights are held, out of what :func:`with_label` returned, for messages.

    >>> format_of("9f+int4-g128"), format_of("9f"), format_of("9f+dense+fp8-128x128")
    ('int4-g128', 'dense', 'dense and other linear layers in fp8-128x128')
    """
    experts, _, linears = (weights.partition("+")[2] or _DENSE).partition("+")
    return f"{experts} and other linear layers in {linears}" if linears else experts


def differ_in_format(one: str, other: str) -> bool:
    """Return whether two workers hold weights in different ways, which are else the same, or are not known.

    >>> differ_in_format("9f+int8-channel", "9f"), differ_in_format("9f+int8-channel", ""), differ_in_format("9f", "8e")
    (True, True, False)
    """
    hashes = {weights.partition("+")[0] for weights in (one, other)} - {""}
    return len(hashes) < 2 and format_of(one) != format_of(other)
