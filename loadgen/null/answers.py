"""What a null server says: nothing that has a meaning, but the same for the same prompt."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

WORDS = 4096


class _Options(msgspec.Struct):
    include_usage: bool = False


class Asked(msgspec.Struct):
    """What a null server reads of a request; the rest is ignored."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: _Options | None = None
    return_token_ids: bool = False
    tools: list[Any] = []

    @property
    def count(self) -> int:
        """Tokens of the answer: as many as are allowed, 16 where nothing is said."""
        found = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return 16 if found is None else max(0, found)

    @property
    def prompt_tokens(self) -> int:
        """Of a list its length, of a text its words."""
        if self.messages:
            return sum(len(str(message.get("content") or "").split()) for message in self.messages)
        return len(self.prompt) if isinstance(self.prompt, list) else len(self.prompt.split())

    def key(self) -> int:
        """A number that depends on the prompt alone."""
        return zlib.crc32(msgspec.json.encode(self.messages or self.prompt))


def token(key: int, index: int) -> int:
    """Returns token ``index`` of the answer to the prompt of ``key``."""
    return zlib.crc32(index.to_bytes(4, "little"), key) % WORDS


def text(token_id: int) -> str:
    return f" w{token_id}"
