"""Counts, for one worker, which peers were refused and which connections ended because of what a peer sent."""

from __future__ import annotations

import ssl
import threading
import time
from collections import Counter

from services.errors import CallFailed, ExpertMeshError, LaneFailed, SeatLeaving, SeatLost

CROWDED = "crowded"
"""The reason where a connection gave way to a later one before it had proven that it knows the secret."""
_TLS, _OTHER = "tls", "error"
_QUIET_S = 10.0
_ORDINARY = (SeatLost, SeatLeaving, LaneFailed, CallFailed)
"""Errors by which connections end in the ordinary course of things, or that other metrics count."""


class Faults:
    """Counts faults of peers by reason. Thread-safe.

    Reasons are codes of :mod:`services.errors` and few others, never text that a peer sent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def note(self, reason: str) -> bool:
        """Count ``reason``; return whether to log it, too.

        That is at most once in 10 s for each reason, so that unknown clients cannot fill the log.
        """
        now = time.monotonic()
        with self._lock:
            self._counts[reason] += 1
            if now < self._quiet_until.get(reason, now):
                return False
            self._quiet_until[reason] = now + _QUIET_S
            return True

    def ended_by(self, error: BaseException) -> bool:
        """Count ``error`` unless connections ordinarily end by it; return whether to log it, as :meth:`note` does."""
        reason = _reason(error)
        return reason is not None and self.note(reason)

    def totals(self) -> dict[str, int]:
        """Return how often each reason was counted since the start."""
        with self._lock:
            return dict(self._counts)


def named(peer: str, error: BaseException) -> str:
    """Return the text of ``error``, after the name of ``peer`` where it does not say which peer it is about."""
    text = str(error)
    return text if peer in text else f"{peer}: {text}"


def _reason(error: BaseException) -> str | None:
    if isinstance(error, ExpertMeshError):
        return None if isinstance(error, _ORDINARY) else error.code
    if isinstance(error, ssl.SSLError):
        return None if isinstance(error, ssl.SSLEOFError) else _TLS
    return None if isinstance(error, OSError) else _OTHER
