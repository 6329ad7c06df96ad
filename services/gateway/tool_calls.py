"""Arguments of tool calls in messages: a client's JSON text in, what a chat template gets out.

Templates expect an object, as transformers' own examples pass one, and print it with ``tojson`` or entry by entry. A
text that is no JSON object, for models write such texts too, stays a text: the template decides.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from services.errors import InvalidRequest

_MAX_VALUES = 16_384
"""Values in all arguments of one conversation, each call counting as one: each takes up to half a kilobyte."""
_MAX_DEPTH = 32
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+["\\]?', re.DOTALL)  # the end is optional, so that no text is read twice
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")


class Arguments:
    """Reads the arguments of one conversation, within bounds for all of them together."""

    def __init__(self) -> None:
        self._left = _MAX_VALUES

    def read(self, text: str) -> dict[str, Any] | str:
        """Returns the object in ``text``, empty where there is no text; ``text`` itself if it is no JSON object.

        Raises InvalidRequest for too many values, or values too deep inside others.
        """
        bare = _STRING.sub("", text)
        self._take(1 + sum(map(bare.count, ",[{")))
        if not text.strip():
            return {}
        if _depth(bare) > _MAX_DEPTH:
            raise _refused(f"have values more than {_MAX_DEPTH} levels deep")
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError:  # numbers of over 4,300 digits, which Python does not write, included
            return text

    def _take(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise _refused(f"have over {_MAX_VALUES} values in all")


def _refused(fault: str) -> InvalidRequest:
    return InvalidRequest(f"The arguments of tool calls {fault}.", hint="Send fewer messages.", param="messages")


def _depth(bare: str) -> int:
    """Returns how deep brackets in ``bare``, JSON without its strings, stand inside others."""
    depth = deepest = 0
    for bracket in _NO_BRACKETS.sub("", bare):
        depth += 1 if bracket in "[{" else -1
        if depth < 0:  # no JSON
            break
        deepest = max(deepest, depth)
    return deepest
