"""What was seen of a long run, in a file instead of memory: requests go in as they end, and come out in pieces.

A gap between chunks is kept as a 32-bit float there, which is right to a ten-millionth.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path

from loadgen.seen import Seen

PIECE = 20_000
"""Requests that are in memory at once: some 40 MB with 64 tokens each."""
_NAMES = tuple(field.name for field in fields(Seen))
_values = attrgetter(*_NAMES)
_GAPS = _NAMES.index("gaps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spooled:
    """``count`` requests in the file ``path``; the first of them was sent at ``begin_s``, the last ended at
    ``end_s``."""

    path: Path
    count: int
    begin_s: float
    end_s: float

    def every(self) -> Iterator[Seen]:
        """Returns the requests in the order of their ends."""
        with self.path.open("rb") as file:
            for _ in range(self.count):
                values = list(pickle.load(file))
                gaps = array("f")
                gaps.frombytes(values[_GAPS])
                values[_GAPS] = array("d", gaps)
                yield Seen(**dict(zip(_NAMES, values, strict=True)))


class Spool:
    """Writes requests into the file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._count, self._begin_s, self._end_s = 0, float("inf"), 0.0

    def add(self, seen: Seen) -> None:
        values = list(_values(seen))
        values[_GAPS] = array("f", seen.gaps).tobytes()
        pickle.dump(values, self._file, pickle.HIGHEST_PROTOCOL)
        self._count += 1
        self._begin_s, self._end_s = min(self._begin_s, seen.sent), max(self._end_s, seen.ended)

    def close(self) -> Spooled:
        """Returns what it has got."""
        self._file.close()
        return Spooled(path=self._path, count=self._count, begin_s=self._begin_s, end_s=self._end_s)
