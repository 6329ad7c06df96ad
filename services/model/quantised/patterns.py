"""Patterns of names in config.json, matched in bounded time. Whoever wrote a checkpoint decides what they are, and the
library's matcher tries ways through a pattern one after the other, of which ``(a+)+$`` has 2 ** n.

A pattern with few ways is the library's. For others the places of a name that can be reached are computed all together,
part by part: what comes out is the same, and no place is looked at twice for one part.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_FEW_WAYS = 4096
"""Through a pattern that is matched by the library: at most so many comparisons for one name."""
_LONGEST = 60
"""Characters of a name, as a pattern's ways are counted."""
_STEPS = 30_000_000
"""Most places that one list of patterns may look at: some seconds, where lists of tools take some hundredths of one."""

_WORD = re.compile(r"(?:(?:[\w-]|\\[^\w\s])(?![*+?{]))+")
_ESCAPED = re.compile(r"\\(.)")

Places = frozenset[int]
Part = Callable[[str, Places], Places]
"""From the places of a text that are reached to those that are reached behind this part of the pattern."""


class PatternCostly(ValueError):
    """Patterns take longer to match than any list of layers needs."""


class Budget:
    """Places that may yet be looked at, by all patterns of a list together."""

    def __init__(self, steps: int | None = None) -> None:
        self._left = _STEPS if steps is None else steps

    def spend(self, steps: int) -> None:
        """Raises PatternCostly: it is spent."""
        self._left -= steps
        if self._left < 0:
            raise PatternCostly


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A piece of a pattern, and how many ways through it there are for one text at most. ``single``: the pattern of the
    one character that it takes."""

    part: Part
    ways: int
    single: str = ""


class Pattern:
    """Matches the beginning of a text, as ``re.match`` does.

    Raises (constructor):
        re.error: it is no pattern, or has something for which ways cannot be bounded, such as a reference to a group.
    """

    def __init__(self, text: str, budget: Budget) -> None:
        re.compile(text)
        if text.endswith(".*") and not text.endswith("\\.*"):
            text = text[:-2]  # at the end of what need only begin a name it takes part in nothing
        self._budget, self._library = budget, re.compile(text)
        read = _Reader(text, budget).read()
        self._part = read.part if read.ways > _FEW_WAYS else None

    def matches(self, name: str) -> bool:
        """Raises PatternCostly."""
        self._budget.spend(1)
        if self._part is None:
            return self._library.match(name) is not None
        return bool(self._part(name, frozenset((0,))))


def only_name(pattern: str) -> str | None:
    r"""Return the one name that ``pattern`` fits, as tools write those of single layers; None where it fits others.

    >>> only_name(r"model\.layers\.0\.mlp\.gate$")
    'model.layers.0.mlp.gate'
    """
    word = _WORD.match(pattern)
    return _ESCAPED.sub(r"\1", word[0]) if word and pattern[word.end() :] == "$" else None


class _Reader:
    """Reads a pattern that the library has accepted, from left to right."""

    def __init__(self, text: str, budget: Budget) -> None:
        self._text, self._at, self._budget = text, 0, budget

    def read(self) -> _Read:
        found = self._either()
        assert self._at == len(self._text), self._text
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, size: int = 1) -> str:
        taken = self._text[self._at : self._at + size]
        self._at += size
        return taken

    def _either(self) -> _Read:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._take()
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        parts = [branch.part for branch in branches]
        return _Read(
            part=lambda text, places: frozenset().union(*(part(text, places) for part in parts)),
            ways=sum(branch.ways for branch in branches),
        )

    def _sequence(self) -> _Read:
        parts: list[Part] = []
        ways = 1
        while self._peek() not in ("", "|", ")"):
            word = self._word()
            piece = _Read(part=_literal(word), ways=1) if word else self._repeated(self._piece())
            parts.append(piece.part)
            ways = min(ways * piece.ways, _FEW_WAYS + 1)

        def part(text: str, places: Places) -> Places:
            for each in parts:
                self._budget.spend(1 + len(places))
                places = each(text, places)
                if not places:
                    break
            return places

        return _Read(part=part, ways=ways)

    def _word(self) -> str:
        """Take the characters that stand for themselves, up to one that is repeated."""
        found = _WORD.match(self._text, self._at)
        return _ESCAPED.sub(r"\1", self._take(len(found[0]))) if found else ""

    def _piece(self) -> _Read:
        first = self._peek()
        if first == "(":
            return self._group()
        begin = self._at
        if first == "[":
            self._skip_class()
        elif self._take() == "\\":
            self._escaped(self._take())
        piece = self._text[begin : self._at]
        found = re.compile(piece)
        if piece in ("^", "$", r"\b", r"\B", r"\A", r"\Z"):
            return _Read(part=_here(found), ways=1)
        return _Read(part=_one(found), ways=1, single=piece)

    def _escaped(self, letter: str) -> None:
        if letter.isdigit() or (letter.isalpha() and letter not in "dDwWsSbBAZntrfva"):
            raise re.error(f"\\{letter} is not read in patterns of layers")

    def _skip_class(self) -> None:
        self._take()
        if self._peek() == "^":
            self._take()
        first = True
        while first or self._peek() != "]":
            if self._take() == "\\":
                self._take()
            first = False
        self._take()

    def _group(self) -> _Read:
        self._take()
        kind = next((kind for kind in ("?:", "?=", "?!", "?<=", "?<!") if self._text.startswith(kind, self._at)), "")
        self._take(len(kind))
        if named := re.compile(r"\?P<\w+>").match(self._text, self._at):
            self._take(len(named[0]))
        elif self._peek() == "?":
            raise re.error(f"({self._text[self._at : self._at + 3]} is not read in patterns of layers")
        begin = self._at
        inside = self._either()
        text = self._text[begin : self._at]
        self._take()
        if kind in ("?<=", "?<!"):
            if inside.ways > 1:
                raise re.error(f"({kind}{text[:40]}) is not read in patterns of layers")
            return _Read(part=_here(re.compile(f"({kind}{text})")), ways=1)
        if kind in ("?=", "?!"):
            return _Read(part=_ahead(inside.part, wanted=kind == "?="), ways=inside.ways)
        return _Read(part=inside.part, ways=inside.ways)

    def _repeated(self, piece: _Read) -> _Read:
        counts = re.compile(r"[*+?]|\{(\d*),?(\d*)\}").match(self._text, self._at)
        if counts is None or counts[0] == "{}" or counts[0] == "{,}":
            return piece
        word = self._take(len(counts[0]))
        if self._peek() == "?":  # as few as possible: the places are the same
            self._take()
        elif self._peek() == "+":
            raise re.error(f"{word}+ is not read in patterns of layers")
        least, most = _bounds(word)
        ways = _FEW_WAYS + 1
        if piece.single or (piece.ways == 1 and least == most):
            ways = max(1, min(_LONGEST, (_LONGEST if most is None else most) - least) + 1)
        elif most == 1:
            ways = piece.ways + 1
        part = _run(piece.single, least, most) if piece.single else _repeat(piece.part, least, most, self._budget)
        return _Read(part=part, ways=ways)


def _bounds(word: str) -> tuple[int, int | None]:
    """Return the least and the most times that ``word``, such as ``*`` or ``{2,}``, says."""
    if word in "*+?":
        return int(word == "+"), 1 if word == "?" else None
    least, comma, most = word[1:-1].partition(",")
    return int(least or 0), int(most) if most else (None if comma else int(least))


def _literal(word: str) -> Part:
    return lambda text, places: frozenset(at + len(word) for at in places if text.startswith(word, at))


def _run(single: str, least: int, most: int | None) -> Part:
    """Return the part of one character's pattern that is repeated."""
    whole = re.compile(f"(?:{single})*")

    def run(text: str, places: Places) -> Places:
        found: set[int] = set()
        end = -1  # of the characters that fit, behind the places so far
        for at in sorted(places):
            if at > end:
                fits = whole.match(text, at)
                assert fits is not None, "no character at all fits everywhere"
                end = fits.end()
            elif most is None:
                continue  # the place before leads to all of these
            last = end if most is None else min(end, at + most)
            found.update(range(at + least, last + 1))
        return frozenset(found)

    return run


def _one(found: re.Pattern[str]) -> Part:
    return lambda text, places: frozenset(at + 1 for at in places if found.match(text, at))


def _here(found: re.Pattern[str]) -> Part:
    return lambda text, places: frozenset(at for at in places if found.match(text, at))


def _ahead(part: Part, *, wanted: bool) -> Part:
    return lambda text, places: frozenset(at for at in places if bool(part(text, frozenset((at,)))) == wanted)


def _repeat(part: Part, least: int, most: int | None, budget: Budget) -> Part:
    def repeated(text: str, places: Places) -> Places:
        for _ in range(least):
            budget.spend(1 + len(places))
            before, places = places, part(text, places)
            if places == before:  # more times lead nowhere else
                break
        found, new, count = places, places, least
        while new and count != most:
            budget.spend(1 + len(new))
            new = part(text, new) - found
            found, count = found | new, count + 1
        return found

    return repeated
