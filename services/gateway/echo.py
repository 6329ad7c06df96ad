"""A prompt that the answer repeats: its text, and its log-probabilities as they come, for all choices of the prompt.

Only one of the choices asks for the scores; the other choices wait for them, and show them, too.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.detokenize import detokenizer
from services.gateway.records import Record, Scores
from services.gateway.tokenizer import TextCodec
from services.messages import PromptScores, TokenLogprob


class Spelled(NamedTuple):
    """A text in UTF-8 and its number of characters; Python's own strings may take four bytes for each character."""

    data: bytes
    chars: int

    @classmethod
    def of(cls, text: str) -> Spelled:
        return cls(text.encode(), len(text))


class Echo:
    """One repeated prompt. ``text`` is the client's text in UTF-8, of ``chars`` characters. ``scored`` says that
    log-probabilities will come."""

    def __init__(self, text: Spelled, token_ids: array[int], codec: TextCodec, *, scored: bool) -> None:
        self.text = text.data
        self.chars = text.chars
        self._ids = token_ids
        self._codec = codec
        self._scores = _begun() if scored else None
        self._attempt = 0
        self._offsets = array("q")
        self._detokenizer = detokenizer(codec)
        self._end = 0  # where the text of the tokens in _offsets ends, in characters
        self._end_byte = 0
        self._reading = threading.Lock()  # offsets are computed when they are first shown, in any thread

    @property
    def complete(self) -> bool:
        """Whether everything to show has come."""
        return self._scores is None or len(self._scores) == len(self._ids)

    @property
    def records(self) -> int:
        """Tokens that are shown with their log-probabilities."""
        return 0 if self._scores is None else len(self._ids)

    @property
    def nbytes(self) -> int:
        return len(self.text) + 8 * self.records + (self._scores.nbytes if self._scores else 0)

    def take(self, attempt: int, scores: PromptScores) -> bool:
        """Takes scores of the next part of the prompt. Known parts are ignored; False where an earlier part is
        missing."""
        if self._scores is None or self.complete:
            return True
        if attempt != self._attempt:  # a new attempt scores from the start
            self._attempt = attempt
            self._scores = _begun()
        if scores.start > len(self._scores):
            return False
        if scores.start == len(self._scores):
            self._scores.extend(scores)
        return True

    def take_all(self, scores: Sequence[TokenLogprob | None]) -> None:
        """Takes all scores at once, as workers of an earlier release send them."""
        if self._scores is not None and not self.complete and len(scores) == len(self._ids):
            self._scores = Scores()
            for score in scores:
                self._scores.add(score)

    def record(self, index: int) -> Record:
        with self._reading:
            while len(self._offsets) <= index:
                self._next_offset()
        assert self._scores is not None
        return Record(self._ids[index], self._scores.at(index), self._offsets[index])

    def _next_offset(self) -> None:
        token_id = self._ids[len(self._offsets)]
        self._offsets.append(self._end)
        shown = self._detokenizer.push(token_id)
        shown = shown or self._codec.special_at(token_id, self.text, self._end_byte)
        self._end += len(shown)
        self._end_byte += len(shown.encode())


def _begun() -> Scores:
    """Returns scores that begin with a prompt's first token, which has none."""
    scores = Scores()
    scores.add(None)
    return scores
