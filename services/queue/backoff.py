"""How long to wait before Redis is asked again after it did not answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.errors import QueueUnavailable

T = TypeVar("T")
FIRST_S = 0.05
MAX_S = 1.0

log = logging.getLogger(__name__)


class Backoff:
    """Doubling delays with jitter, so that the processes of a deployment do not return at the same time."""

    def __init__(self, *, first_s: float = FIRST_S, max_s: float = MAX_S) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0

    @property
    def failing(self) -> bool:
        """Whether a failure was seen since the last success."""
        return self._failures > 0

    def failed(self) -> float:
        """Notes a failure. Returns the seconds to wait now."""
        delay = min(self._max_s, self._first_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, 30)
        return delay * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self._failures = 0


async def until_answered(what: str, call: Callable[[], Awaitable[T]], backoff: Backoff) -> T:
    """Repeats ``call`` until Redis answers and returns its result. ``what`` names the caller in the log."""
    while True:
        try:
            result = await call()
        except QueueUnavailable as error:
            if not backoff.failing:
                log.warning("%s is waiting: %s", what, error.message)
            await asyncio.sleep(backoff.failed())
        else:
            if backoff.failing:
                log.info("%s resumes: Redis answers again", what)
                backoff.succeeded()
            return result
