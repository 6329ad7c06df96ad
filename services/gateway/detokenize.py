"""Tokens in, text out as they come: never half a UTF-8 character, never a part of a stop string.

``push`` takes one token id and returns the text that is final with it; ``flush`` returns the text held back so far.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence
from typing import Protocol

from services.gateway.tokenizer import TextCodec

_CONTEXT = 6  # prompt tokens that decide whether the first generated token has a leading space
_MAX_PENDING = 16  # tokens that may end in an incomplete character before it counts as invalid
_REPLACEMENT = "\ufffd"
_NOTHING = -1  # no character


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """Decodes byte-level vocabularies by a table and an incremental UTF-8 decoder, exactly at every token."""

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
    """Decodes other vocabularies: a short window of tokens, of which it returns the text that the newest one added.

    ``prompt_tail`` goes before the first token, so that a leading space which the decoder would strip survives.
    """

    def __init__(self, codec: TextCodec, prompt_tail: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = list(prompt_tail[-_CONTEXT:])
        self._shown = len(self._window)  # tokens of the window whose text is out
        self._text = self._decode(self._window)  # the text of these tokens

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._shown
        if len(text) <= len(self._text) or (text.endswith(_REPLACEMENT) and pending < _MAX_PENDING):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        piece = text[len(self._text) :]
        newest = self._window[self._shown :]
        newest_text = self._decode(newest)
        if newest_text:  # special tokens alone are no context: keep the window until text follows them
            self._window, self._text = newest, newest_text
        else:
            self._text = text
        self._shown = len(self._window)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=True)


def detokenizer(codec: TextCodec, prompt_tail: Sequence[int] = ()) -> Detokenizer:
    """Returns a detokenizer for text that continues ``prompt_tail``."""
    return ByteDetokenizer(codec) if codec.byte_level else WindowDetokenizer(codec, prompt_tail)


class StopSet:
    """Stop strings of a request, prepared once for all of its sequences. None of ``stops`` is empty, and they have less
    than 65,536 characters in all.

    It is the automaton of Aho and Corasick ("Efficient string matching", 1975): a state is the beginning of a stop
    string, 0 the empty one. States of one string follow each other, so only states where strings diverge need a table.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.firsts = frozenset(stop[0] for stop in stops)
        self.depths = array("H", [0])  # characters of each state
        self._following = array("i", [_NOTHING])  # the character by which state + 1 goes on from state
        self._branches: dict[int, dict[int, int]] = {}  # the state that any other character leads to
        ends = {self._add(stop) for stop in stops}
        empty = bytes(self.depths.itemsize * len(self.depths))
        self._shorter = array("H", empty)  # the longest other state that each state ends with
        self.found = array("H", empty)  # characters of the longest stop string that each state ends with
        self._link(ends)

    def finder(self) -> StopStrings:
        """Returns a finder for one sequence."""
        return StopStrings(self)

    def step(self, state: int, code: int) -> int:
        """Returns the state of a text that was in ``state`` before the character ``code``."""
        following, branches = self._following, self._branches
        while following[state] != code:
            if state in branches and (then := branches[state].get(code)):
                return then
            if not state:
                return 0
            state = self._shorter[state]
        return state + 1

    def _add(self, stop: str) -> int:
        """Adds ``stop`` and returns its last state."""
        codes = array("i", map(ord, stop))
        state = depth = 0
        while depth < len(codes) and (then := self._then(state, codes[depth])):
            state, depth = then, depth + 1
        return self._grow(state, codes[depth:]) if depth < len(codes) else state

    def _then(self, state: int, code: int) -> int:
        """Returns the state after ``state`` and ``code`` where a stop string begins so, else 0."""
        return state + 1 if self._following[state] == code else self._branches.get(state, {}).get(code, 0)

    def _grow(self, state: int, codes: array[int]) -> int:
        """Adds states for ``codes`` after ``state`` and returns the last one."""
        new, depth = len(self.depths), self.depths[state]
        if new == state + 1:
            self._following[state] = codes[0]
        else:
            self._branches.setdefault(state, {})[codes[0]] = new
        self._following += codes[1:]
        self._following.append(_NOTHING)
        self.depths.extend(range(depth + 1, depth + 1 + len(codes)))
        return len(self.depths) - 1

    def _link(self, ends: set[int]) -> None:
        """Completes all states, the shortest first: each one builds on shorter ones."""
        following, shorter, step = self._following, self._shorter, self.step
        for state in sorted(range(len(following)), key=self.depths.__getitem__):
            after = [(following[state], state + 1), *self._branches.get(state, {}).items()]
            for code, then in after:
                if code != _NOTHING:
                    shorter[then] = fall = step(shorter[state], code) if state else 0
                    self.found[then] = self.depths[then] if then in ends else self.found[fall]


class StopStrings:
    """Finds the first stop string in a growing text, and holds back text that may become one.

    Each character costs about two steps of the automaton, for any text and any number of stop strings.
    """

    def __init__(self, stops: StopSet) -> None:
        self._set = stops
        self._state = 0  # the longest beginning of a stop string that the text ends with
        self._held = ""  # that beginning

    def push(self, piece: str) -> tuple[str, bool]:
        """Returns text that may go out, and whether a stop string was found, which never goes out. Of stop strings that
        end in ``piece`` the one that begins first counts."""
        if not self._held and self._set.firsts.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        begin = self._follow(piece)
        if begin is not None:
            self._held, self._state = "", 0
            return text[:begin], True
        final = len(text) - self._set.depths[self._state]
        self._held = text[final:]
        return text[:final], False

    def flush(self) -> str:
        held, self._held, self._state = self._held, "", 0
        return held

    def _follow(self, piece: str) -> int | None:
        """Returns where a stop string begins, counted from the start of the held text; None while none has come."""
        state, step, found = self._state, self._set.step, self._set.found
        begins = []
        for end, code in enumerate(map(ord, piece), start=len(self._held) + 1):
            state = step(state, code)
            if found[state]:
                begins.append(end - found[state])
        self._state = state
        return min(begins, default=None)
