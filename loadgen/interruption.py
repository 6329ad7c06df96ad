"""A run that is asked to end early: by Ctrl-C, or by the SIGTERM of whoever stops a pod. What it has seen is kept."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Interruption:
    """``asked``: the name of the signal that asked for the end, None as long as none did. Nobody hears a signal outside
    of :meth:`heard`, so that one ends the program there; so does a second one."""

    asked: str | None = None
    _also: list[Callable[[], None]] = field(default_factory=list)

    @contextmanager
    def heard(self, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Of this context it is enough that it ends when ``asked`` is set. ``also`` is called by the signal."""
        self._also.append(also)
        try:
            yield
        finally:
            self._also.remove(also)

    def ask(self, name: str) -> None:
        """Ask for the end in the name of a signal.

        Raises:
            KeyboardInterrupt: nobody would hear it, or it has been asked for.
        """
        if not self._also or self.asked is not None:
            raise KeyboardInterrupt
        self.asked = name
        for call in self._also:
            call()


@contextmanager
def signals() -> Iterator[Interruption]:
    """Returns what Ctrl-C and SIGTERM ask to end, while the context is open."""
    found = Interruption()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        found.ask(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
