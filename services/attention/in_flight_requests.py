"""Requests that a worker has accepted and whose end is not yet in Redis. Event loop only."""

from __future__ import annotations

import asyncio


class InFlightRequests:
    """Request id -> attempt, from the assignment until its end is published or Redis turns out not to want it.

    Requests stay here longer than in the engine: leases must be kept while the last events wait for Redis.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}
        self.tenants: dict[str, str] = {}
        """Request id -> tenant, of the same requests."""
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._attempts)

    def held(self) -> dict[str, int]:
        """Return a copy, for a heartbeat."""
        return dict(self._attempts)

    def open(self, request_id: str, attempt: int, tenant: str = "") -> bool:
        """Hold ``attempt`` of a request of ``tenant``; False if it or a later one is already held."""
        if self._attempts.get(request_id, 0) >= attempt:
            return False
        self._attempts[request_id] = attempt
        self.tenants[request_id] = tenant
        self._empty.clear()
        return True

    def close(self, request_id: str, attempt: int) -> None:
        """Drop ``attempt`` and those before it."""
        if self._attempts.get(request_id, attempt + 1) <= attempt:
            del self._attempts[request_id], self.tenants[request_id]
        if not self._attempts:
            self._empty.set()

    async def emptied(self) -> None:
        """Return once nothing is held."""
        await self._empty.wait()
