"""Which parts of an answer's text are content, and which are the reasoning before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Literal

PartKind = Literal["content", "reasoning"]


class Parts:
    """Where parts begin in a text that grows. A text of which nothing was noted is content."""

    def __init__(self) -> None:
        self._begins = [0]
        self._kinds: list[PartKind] = ["content"]

    def note(self, begin: int, kind: PartKind) -> None:
        """Notes that what comes from ``begin`` on is ``kind``."""
        if kind == self._kinds[-1]:
            return
        if begin == self._begins[-1]:
            self._kinds[-1] = kind
        else:
            self._begins.append(begin)
            self._kinds.append(kind)

    def at(self, place: int, length: int) -> tuple[PartKind, int]:
        """Returns of what kind the text at ``place`` is, and where that part ends, in a text of ``length``."""
        after = bisect_right(self._begins, place)
        return self._kinds[after - 1], self._begins[after] if after < len(self._begins) else length

    def of(self, kind: PartKind, length: int) -> Iterator[tuple[int, int]]:
        """Yields begin and end of each part that is ``kind``, in a text of ``length``."""
        for begin, end, found in zip(self._begins, [*self._begins[1:], length], self._kinds, strict=True):
            if found == kind:
                yield begin, end
