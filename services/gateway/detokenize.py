"""Tokens to text as they come: never half a UTF-8 character, never a part of a stop string.

``push`` takes one token id and returns the text that is settled by it; ``flush`` returns what was still held back.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence
from itertools import repeat
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


class StopSet:
    """Stop strings of a request, prepared once for all of its sequences. None of ``stops`` is empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self.borders = tuple(_borders(stop) for stop in self.stops)
        self.firsts = frozenset(stop[0] for stop in self.stops)

    def finder(self) -> StopStrings:
        """For one sequence."""
        return StopStrings(self)


class StopStrings:
    """Finds the first stop string in a growing text. Holds back whatever may yet turn into one.

    Each character is compared about once with each stop string, whatever the text (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: StopSet) -> None:
        self._set = stops
        self._matched = [0] * len(stops.stops)  # characters of each that the text ends with
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may go out, and whether a stop string was met; the stop string itself never goes out."""
        if not self._held and self._set.firsts.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        hits = [at for at in map(self._follow, range(len(self._matched)), repeat(piece)) if at is not None]
        if hits:
            end, self._held = len(self._held) + min(hits), ""
            return text[:end], True
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _follow(self, number: int, piece: str) -> int | None:
        """Where the stop string of that number begins, from the start of ``piece``; None while it has not come."""
        stop, borders, matched = self._set.stops[number], self._set.borders[number], self._matched[number]
        for at, character in enumerate(piece, start=1):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                return at - matched
        self._matched[number] = matched
        return None


def _borders(text: str) -> array[int]:
    """For each beginning of ``text``, how long the longest proper beginning is that it also ends with."""
    borders = array("i", [0])
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length - 1]
        borders.append(length + (text[length] == character))
    return borders
