"""A conversation on its way through the chat template, and characters that stand in for its texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.errors import InvalidRequest

_FIRST, _LAST = 0x100000, 0x10FFFC  # of a plane for private use: no text needs them
STAND_IN = f"[{chr(_FIRST)}-{chr(_LAST)}]"
"""Any of these characters, as an expression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The template's input. The client wrote ``messages``, except the roles, and strings in ``options``."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool
    options: Mapping[str, Any]

    def texts(self) -> list[str]:
        """Returns everything that the client wrote."""
        said = (text for message in self.messages for name, text in message.items() if name != "role")
        return [*said, *(value for value in self.options.values() if isinstance(value, str))]

    def with_texts(self, said: Callable[[str], str], option: Callable[[str], str]) -> Conversation:
        """Returns a copy with other texts: ``said`` changes texts of messages, ``option`` the strings of options."""
        return Conversation(
            messages=[
                {name: text if name == "role" else said(text) for name, text in message.items()}
                for message in self.messages
            ],
            add_generation_prompt=self.add_generation_prompt,
            options={name: option(value) if isinstance(value, str) else value for name, value in self.options.items()},
        )


class StandIns:
    """Characters that stand in for texts, so that a template can neither see nor change the texts."""

    def __init__(self, template: str) -> None:
        """Uses no characters of ``template``."""
        self._free = (char for char in map(chr, range(_FIRST, _LAST + 1)) if char not in template)
        self._chars: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """Returns the character for ``text``. Raises InvalidRequest when there are no more."""
        char = self._chars.get(text)
        if char is None:
            char = next(self._free, None)
            if char is None:
                raise InvalidRequest("The messages have too many characters for private use.", param="messages")
            self._chars[text], self._texts[char] = char, text
        return char

    def reveal(self, text: str) -> str:
        """Returns ``text`` with the texts that its characters stand in for."""
        return re.sub(STAND_IN, lambda found: self._texts.get(found[0], found[0]), text)
