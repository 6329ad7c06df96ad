"""Tokens to text as they come: never half a UTF-8 character, never a part of a stop string.

``push`` takes one token id and returns the text that is settled by it; ``flush`` returns what was still held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.gateway.tokenizer import TextCodec

_CONTEXT = 6  # prompt tokens before the first generated one that settle its leading space
_PATIENCE = 16  # tokens that may end in an incomplete character before it is taken for invalid
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """For byte-level vocabularies: a table lookup and an incremental UTF-8 decoder, exact at every token."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._skip = codec.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._codec.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDetokenizer:
    """For any other decoder: decodes a short window of tokens and returns what the newest one added.

    ``prompt_tail`` goes before the first token, so that a leading space which the decoder would strip survives.
    """

    def __init__(self, codec: TextCodec, prompt_tail: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = list(prompt_tail[-_CONTEXT:])
        self._settled = len(self._window)  # tokens of the window whose text is out
        self._text = self._decode(self._window)  # text of those

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._settled
        if len(text) <= len(self._text) or (text.endswith(_REPLACEMENT) and pending < _PATIENCE):
            return ""
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._decode(self._window))

    def _settle(self, text: str) -> str:
        piece = text[len(self._text) :]
        newest = self._window[self._settled :]
        newest_text = self._decode(newest)
        if newest_text:  # special tokens alone are no context: keep the window until there is text behind them
            self._window, self._text = newest, newest_text
        else:
            self._text = text
        self._settled = len(self._window)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=True)


def detokenizer(codec: TextCodec, prompt_tail: Sequence[int] = ()) -> Detokenizer:
    """The fitting detokeniser for text that continues ``prompt_tail``."""
    return ByteDetokenizer(codec) if codec.byte_level else WindowDetokenizer(codec, prompt_tail)


class StopStrings:
    """Finds the first stop string in a growing text. Holds back whatever may yet turn into one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may go out, and whether a stop string was met; the stop string itself never goes out."""
        text = self._held + piece
        hits = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if hits:
            self._held = ""
            return text[: min(hits)], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
