"""What a terminal shows while a bench goes on: one line that is written again. Elsewhere, a line for each stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_EVERY_S = 0.2


class Progress:
    """Writes to ``out``, by default stderr."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._stage, self._length, self._last = "", 0, 0.0

    def stage(self, text: str) -> None:
        """Say what is done next."""
        self._stage, self._last = text, 0.0
        if self._out.isatty():
            self._write(text)
        else:
            print(text, file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Say how far the stage is. Only a terminal shows it, and not each time."""
        if self._out.isatty() and (now := self._clock()) - self._last > _EVERY_S:
            self._last = now
            self._write(f"{self._stage}: {text}")

    def clear(self) -> None:
        """Leave the line empty for what comes after."""
        if self._out.isatty():
            self._write("")
            self._out.write("\r")
            self._out.flush()

    def _write(self, text: str) -> None:
        self._out.write("\r" + text.ljust(self._length))
        self._out.flush()
        self._length = len(text)
