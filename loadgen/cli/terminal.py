"""What a terminal shows while a run goes on."""

from __future__ import annotations

import sys
from typing import TextIO

from loadgen.drive import Progress
from loadgen.results import Probe


class LiveLine:
    """One line of a terminal, written again; nothing where ``out``, by default stderr, is none."""

    def __init__(self, out: TextIO | None = None, *, show: bool = True) -> None:
        self._out = out or sys.stderr
        self._show = show and self._out.isatty()
        self._length = 0

    def __call__(self, progress: Progress) -> None:
        where = f"{progress.sent:,} sent, {progress.ended:,} ended, {progress.in_flight:,} under way"
        text = f"{progress.seconds:7.1f} s  {where}"
        if progress.failed:
            text += f", {progress.failed} of the last thousand not answered"
        self._write(text)

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._show:
            self._out.write("\r" + text.ljust(self._length) + ("" if text else "\r"))
            self._out.flush()
            self._length = len(text)


def probe_line(probe: Probe) -> str:
    return f"{probe.rate:10.3f} a second  {probe.verdict:9}  {probe.why}"
