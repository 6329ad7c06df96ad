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


Change = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The template's input. The client wrote all texts in ``messages``, except the roles and the types of tool calls,
    and strings in ``options``."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    options: Mapping[str, Any]

    def texts(self) -> list[str]:
        """Returns everything that the client wrote."""
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        self.with_texts(note, note, note)
        return found

    def with_texts(self, said: Change, option: Change, label: Change) -> Conversation:
        """Returns a copy with other texts: ``said`` changes texts of messages, ``option`` the strings of options,
        ``label`` the ids of tool calls and the names of their functions."""
        return Conversation(
            messages=[_message(message, said, label) for message in self.messages],
            add_generation_prompt=self.add_generation_prompt,
            options={name: option(value) if isinstance(value, str) else value for name, value in self.options.items()},
        )


def _message(message: Mapping[str, Any], said: Change, label: Change) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in message.items():
        if name == "role" or value is None:
            changed[name] = value
        elif name == "tool_calls":
            changed[name] = [_call(call, said, label) for call in value]
        else:
            changed[name] = label(value) if name == "tool_call_id" else said(value)
    return changed


def _call(call: Mapping[str, Any], said: Change, label: Change) -> dict[str, Any]:
    function = call["function"]
    changed = {"name": label(function["name"]), "arguments": _json(function["arguments"], said)}
    return {name: label(value) if name == "id" else value for name, value in call.items()} | {"function": changed}


def _json(value: Any, said: Change) -> Any:
    """Returns ``value`` with other texts; names in objects are texts, too, and stay as many as they were."""
    if isinstance(value, str):
        return said(value)
    if isinstance(value, list):
        return [_json(item, said) for item in value]
    if not isinstance(value, dict):
        return value
    changed: dict[str, Any] = {}
    for name, item in value.items():
        other = said(name)
        changed[f"{other}{len(changed)}" if other in changed else other] = _json(item, said)
    return changed


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
                raise InvalidRequest("The messages have too many private-use characters of Unicode.", param="messages")
            self._chars[text], self._texts[char] = char, text
        return char

    def reveal(self, text: str) -> str:
        """Returns ``text`` with the texts that its characters stand in for."""
        return re.sub(STAND_IN, lambda found: self._texts.get(found[0], found[0]), text)
