"""How often others were refused, or a connection ended for what they sent, by reason. Of one worker."""

from __future__ import annotations

import ssl
import threading
import time
from collections import Counter

from services.errors import CallFailed, ExpertMeshError, LaneFailed, SeatLeaving, SeatLost

CROWDED = "crowded"
"""A connection that had proven nothing yet gave way to a later one."""
_TLS, _OTHER = "tls", "error"
_QUIET_S = 10.0
_ORDINARY = (SeatLost, SeatLeaving, LaneFailed, CallFailed)
"""Ends that are nobody's fault, or that are told elsewhere."""


class Faults:
    """Thread-safe. Reasons are codes of :mod:`services.errors` and few others: never text of a peer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._quiet_until: dict[str, float] = {}

    def note(self, reason: str) -> bool:
        """Whether to tell it in the log, too: strangers must not fill that."""
        now = time.monotonic()
        with self._lock:
            self._counts[reason] += 1
            if now < self._quiet_until.get(reason, now):
                return False
            self._quiet_until[reason] = now + _QUIET_S
            return True

    def ended_by(self, error: BaseException) -> bool:
        """Counts ``error`` unless connections end by it in the ordinary course of things. As :meth:`note`."""
        reason = _reason(error)
        return reason is not None and self.note(reason)

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def _reason(error: BaseException) -> str | None:
    if isinstance(error, ExpertMeshError):
        return None if isinstance(error, _ORDINARY) else error.code
    if isinstance(error, ssl.SSLError):
        return None if isinstance(error, ssl.SSLEOFError) else _TLS
    return None if isinstance(error, OSError) else _OTHER
