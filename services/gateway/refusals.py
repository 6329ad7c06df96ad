"""Refusals of connections and requests: counted by reason, and logged now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_QUIET_S = 10.0


@dataclass(slots=True)
class _Logged:
    at: float
    left_out: int = 0


class Refusals:
    """Logs one line per reason every ten seconds, with the number of lines left out, so that a flood fills no log.
    ``reason`` is a label: use few values, and none from clients."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = metrics.refused
        self._clock = clock
        self._logged: dict[str, _Logged] = {}

    def note(self, reason: str, text: str) -> None:
        """Counts one refusal; ``text`` describes it in the log."""
        self._counter.labels(reason).inc()
        now, last = self._clock(), self._logged.get(reason)
        if last is not None and now - last.at < _QUIET_S:
            last.left_out += 1
            return
        more = f" ({last.left_out} more since the last such line)" if last is not None and last.left_out else ""
        log.warning("%s%s", text, more, extra={"reason": reason})
        self._logged[reason] = _Logged(now)
