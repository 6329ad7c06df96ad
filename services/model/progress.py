"""How far loading has come, on its way to the terminal as a bar, or to the log as lines."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

_MIB = 1024 * 1024
_LOG_EVERY_S = 5.0


class Progress(Protocol):
    """Told what is loaded. Phases follow one another; bytes are those of the files."""

    def begin(self, what: str, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...


class ProgressReporter(Progress, AbstractContextManager["ProgressReporter"], Protocol):
    """A :class:`Progress` that shows something, from when it is entered until it is left."""


class NoProgress:
    """Tells nobody."""

    def begin(self, what: str, total_bytes: int) -> None:
        del what, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes


class LoadStopped(Exception):
    """Nobody wants any more what is being loaded."""


class Stoppable:
    """``progress`` that ends the loading, between two tensors, once ``stopped`` is set: it raises LoadStopped."""

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
    """A bar per phase, with speed and time left, on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = RichProgress(*columns, TimeRemainingColumn(), console=Console(file=stream))
        self._task = self._bars.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, what: str, total_bytes: int) -> None:
        self._task = self._bars.add_task(what, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        self._bars.advance(self._task, nbytes)


class LogProgress:
    """A log line when a phase begins, every few seconds, and when it is done."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._what, self._total, self._done, self._last_s = "", 0, 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, what: str, total_bytes: int) -> None:
        self._what, self._total, self._done, self._last_s = what, total_bytes, 0, time.monotonic()
        self._logger.info("loading %s: %.0f MiB", what, total_bytes / _MIB)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now_s = time.monotonic()
        if self._done >= self._total:
            self._logger.info("loaded %s", self._what)
        elif now_s - self._last_s >= _LOG_EVERY_S:
            self._last_s = now_s
            self._logger.info("loading %s: %d %%", self._what, 100 * self._done // self._total)


def loading_progress(logger: logging.Logger, stream: TextIO = sys.stderr) -> ProgressReporter:
    """A bar where ``stream`` is a terminal, log lines elsewhere. Use it in a ``with``."""
    return BarProgress(stream) if stream.isatty() else LogProgress(logger)
