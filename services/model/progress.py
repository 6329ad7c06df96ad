"""Shows how far loading has come: as a bar on a terminal, elsewhere as log lines."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

_MIB = 1024 * 1024
_LOG_EVERY_S = 5.0


class Progress(Protocol):
    """Gets word of what is loaded. Phases follow one another; bytes are those of the files."""

    def begin(self, what: str, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...


class NoProgress:
    """Shows nothing."""

    def begin(self, what: str, total_bytes: int) -> None:
        del what, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes


class LoadStopped(Exception):
    """Loading was stopped because its result is no longer wanted."""


class Stoppable:
    """Passes progress on to ``progress``. Once ``stopped`` is set it raises LoadStopped between two tensors."""

    def __init__(self, progress: Progress, stopped: threading.Event) -> None:
        self._progress = progress
        self._stopped = stopped

    def begin(self, what: str, total_bytes: int) -> None:
        self._progress.begin(what, total_bytes)

    def advance(self, nbytes: int) -> None:
        self._progress.advance(nbytes)
        if self._stopped.is_set():
            raise LoadStopped("The loading was stopped.")


class BarProgress:
    """A bar for each phase, with speed and time left."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=None, visible=False)

    def begin(self, what: str, total_bytes: int) -> None:
        self._task = self._bars.add_task(what, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        self._bars.advance(self._task, nbytes)


class LogProgress:
    """A log line every few seconds of a phase, and when it is done."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._what, self._total, self._done = "", 0, 0
        self._began_s = self._last_s = 0.0

    def begin(self, what: str, total_bytes: int) -> None:
        self._what, self._total, self._done = what, total_bytes, 0
        self._began_s = self._last_s = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now_s = time.monotonic()
        if self._done >= self._total:
            took_s = now_s - self._began_s
            self._logger.info("loaded %s: %.1f MiB in %.1f s", self._what, self._total / _MIB, took_s)
        elif now_s - self._last_s >= _LOG_EVERY_S:
            self._last_s = now_s
            self._logger.info("loading %s: %d %%", self._what, 100 * self._done // self._total)


@contextmanager
def loading_progress(logger: logging.Logger, stream: TextIO = sys.stderr) -> Iterator[Progress]:
    """Show what is loaded inside: as bars where ``stream`` is a terminal that this process has to itself, as log lines
    elsewhere."""
    if not _has_terminal(stream):
        yield LogProgress(logger)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, TimeRemainingColumn(), console=Console(file=stream)) as bars:
        yield BarProgress(bars)


def _has_terminal(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal in whose foreground this process is. The children of `serve` are in
    sessions of their own: each other's bars would overwrite them."""
    if not stream.isatty():
        return False
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except io.UnsupportedOperation:  # it stands in for a terminal
        return True
    except OSError:  # the terminal of another session
        return False
