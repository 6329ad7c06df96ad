"""Whether a text may fit into the context, found out without tokenizing much more than fits, or for long."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from services.errors import ContextLengthExceeded
from services.gateway.tokenizer import TextCodec

_PIECE_CHARS = 128 * 1024
"""What is not longer is tokenized as it is. Tokenizing takes up to 0.4 KB for each character while it lasts (digits;
0.08 for prose), so this is 50 MB at most."""
_MAX_CHARS = 1024 * 1024
_MAX_CHARS_A_TOKEN = 8
"""A longer text is not tokenized at all, though it may fit: that takes 0.6 us and up to 0.15 KB for each character, and
nobody else's long text is tokenized meanwhile. Of prose and code a token has three to five characters; texts with more
than eight are white space, or one thing over and over."""
_SAMPLES = 16
_SAMPLE_CHARS = 1024
_SURELY = 0.9
"""Of the context: a text that has no more tokens by its samples is tokenized whole. They are taken at random, so that
nobody can write a text that is sparse where they are."""
_SLACK = 256
"""Tokens by which a cut may raise the count. Tokens are made of neighbours: of a word, or of characters whose merging
depends on what merges beside them. A cut therefore changes those beside it, and on: as far as one merge hangs on the
next, which is a few tokens; at a space, where :func:`_cut` looks for one, mostly none. The most are for tokenizers that
make one token of a long word that they do not know: its beginning may be known by its letters, of which they look at a
hundred. A text is refused when its pieces exceed the context by this for each cut, which no text does that fits."""
_SEARCHED = 1024  # characters before the place of a cut
_BEFORE_SPACE = re.compile(r".*\S(?=\s)", re.DOTALL)


class Fits:
    """For one tokenizer; ``most`` tells the tokens of the context."""

    def __init__(self, codec: TextCodec, most: Callable[[], int]) -> None:
        self._codec = codec
        self._most = most
        self._random = random.Random()
        # Others drop characters that they do not know, or make one token of any number of them.
        self._knows_all = codec.byte_level or bool(getattr(codec.tokenizer.model, "byte_fallback", False))

    def short(self, text: str) -> bool:
        """Whether ``text`` may be tokenized without :meth:`check`, whatever it is."""
        return len(text) <= _PIECE_CHARS

    def check(self, text: str, param: str) -> None:
        """Raises ContextLengthExceeded, naming ``param``, where ``text`` cannot fit. Takes as long as tokenizing so
        much of it as fits, or a sample of it: never on the event loop, unless the text is short."""
        self._refuse_long(text, param)
        if self._knows_all:
            self._refuse(len(text) // self._codec.longest_token, param)
        if self.short(text) or self._estimate(text) <= _SURELY * self._most():
            return
        found = 0
        for cuts, piece in enumerate(_pieces(text), 1):
            found += self._count(piece)
            self._refuse(found - cuts * _SLACK, param)

    def _estimate(self, text: str) -> float:
        starts = (self._random.randrange(len(text) - _SAMPLE_CHARS) for _ in range(_SAMPLES))
        sample = "\n".join(text[start : start + _SAMPLE_CHARS] for start in starts)
        return self._count(sample) * len(text) / len(sample)

    def _count(self, text: str) -> int:
        return len(self._codec.encode(text, add_special_tokens=False))

    def _refuse_long(self, text: str, param: str) -> None:
        most = max(_MAX_CHARS, _MAX_CHARS_A_TOKEN * self._most())
        if len(text) > most:
            raise ContextLengthExceeded(
                f"The prompt has {len(text)} characters; {most} are the most with this context.",
                hint="Shorten it, or send token ids.",
                param=param,
            )

    def _refuse(self, fewest: int, param: str) -> None:
        most = self._most()
        if fewest > most:
            raise ContextLengthExceeded(
                f"The prompt has at least {fewest} tokens; the context holds {most}.", hint="Shorten it.", param=param
            )


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = _cut(text, start, start + _PIECE_CHARS)
        yield text[start:end]
        start = end


def _cut(text: str, start: int, end: int) -> int:
    """A place up to ``end`` before a space and behind something else, if there is one near; else ``end``."""
    if end >= len(text):
        return len(text)
    found = _BEFORE_SPACE.match(text, max(start + 1, end - _SEARCHED), end)
    return found.end() if found is not None else end
