"""Prompts without a meaning, of a given length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import BadSetting

_WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all their there been if more when will would who so no she other its may these what them than
some him time into only do such my new about out also two any up first could our then most see me should after said your
very between made many over did like those before must through years where much way well down even because good each
life long day same might still such own under last right old great since world hand while house night water light stone
river sea wind hill road field tree bird fish king ship door fire gold green white black small early winter summer"""
COMMON: Sequence[str] = tuple(_WORDS.split())
"""Words that most tokenizers have as one token each."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform from ``least`` to ``most``, both included."""

    least: int
    most: int

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


def parse_lengths(text: str) -> Lengths:
    """Returns the lengths of a setting: ``64``, or ``8..128``.

    Raises:
        BadSetting: it is neither.
    """
    least, _, most = text.partition("..")
    try:
        found = Lengths(int(least), int(most or least))
    except ValueError as error:
        raise BadSetting(f"{text!r} is no length.", hint="Write 64 or 8..128.") from error
    if not 1 <= found.least <= found.most:
        raise BadSetting(f"{text!r} is no length.", hint="Lengths are 1 or more, the lesser one first.")
    return found


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes contents of a number of tokens. ``ids``: as random ids from ``first`` up to ``vocabulary``, exact; else as
    common words, whose number in tokens depends on the tokenizer (answers say it)."""

    ids: bool
    vocabulary: int = 1000
    first: int = 10
    """Ids below are often special."""

    def make(self, rng: random.Random, tokens: int) -> str | list[int]:
        return self.token_ids(rng, tokens) if self.ids else self.words(rng, tokens)

    def token_ids(self, rng: random.Random, tokens: int) -> list[int]:
        first, span = self.first, self.vocabulary - self.first
        return [first + int(rng.random() * span) for _ in range(tokens)]

    def words(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(COMMON, k=tokens))
