"""Whether this gateway can serve, and if not, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from services.errors import QueueUnavailable
from services.gateway.auth import KeyStore
from services.gateway.recent import Recent
from services.gateway.results import ResultFollower

_LOOKS_PER_S = 4.0


class Readiness:
    """Checks what a request needs. Redis is asked a few times a second, however often clients ask."""

    def __init__(
        self, follower: ResultFollower, led: Callable[[], Coroutine[Any, Any, object]], keys: KeyStore | None = None
    ) -> None:
        """``led`` finds the lock of the leading scheduler; it raises QueueUnavailable while Redis is away."""
        self._follower = follower
        self._led = Recent(led, _LOOKS_PER_S)
        self._keys = keys
        self._connected = False

    def connected(self) -> bool:
        """Says whether Redis has answered once. While it is away later, this gateway answers clients with errors."""
        self._connected = self._connected or self._follower.up
        return self._connected

    async def missing(self) -> list[str]:
        """Returns the names of what is missing: ``api keys``, ``redis``, ``scheduler``, ``worker``."""
        keys = [] if self._keys is None or await self._keys.usable() else ["api keys"]
        if not self._follower.up:
            return [*keys, "redis"]
        try:
            led = await self._led.get()
        except QueueUnavailable:
            return [*keys, "redis"]
        return keys + ([] if led else ["scheduler"]) + ([] if self._follower.workers else ["worker"])
