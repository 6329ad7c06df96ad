"""What clients saw and what was done to the deployment, in its order: a line of JSON for each, written meanwhile.

A request begins with ``invoke``. Each try is ``refused`` (status 0: no answer came) or ``admitted``, and then brings
``tokens`` from the first one on, until it is ``broken`` or ends with ``end`` or ``failed``. :mod:`chaos.checker` reads
the lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

What = Literal["answer", "invoke", "refused", "admitted", "tokens", "broken", "end", "failed", "fault", "over"]


class Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """``at`` in seconds. An ``answer`` is what a job's requests must get: ``ids``, ``text`` and ``finish``."""

    what: What
    at: float = 0.0
    key: str = ""
    """The request's Idempotency-Key; for ``fault`` and ``over`` the kind of fault."""
    client: int = 0
    job: int = 0
    target: str = ""
    status: int = 0
    index: int = 0
    """Of the first of ``ids``."""
    ids: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""


class History:
    """A file of lines. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._start = time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, what: What, **facts: object) -> None:
        line = Line(what=what, at=round(time.perf_counter() - self._start, 4), **facts)  # type: ignore[arg-type]
        self._file.write(self._encoder.encode(line) + b"\n")

    def lines(self) -> Iterator[Line]:
        """All that was written, from the first line on."""
        self._file.flush()
        decoder = msgspec.json.Decoder(Line)
        with self.path.open("rb") as file:
            yield from map(decoder.decode, file)
