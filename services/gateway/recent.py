"""Results that take time to make and that any client may ask for: a bounded number is made per second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The result of ``make``: a new one, or the last one where ``per_s`` were made within the last second. All callers
    that come while one is made get the same result, or its error."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], per_s: float) -> None:
        self._make = make
        self._per_s = per_s
        self._allowance = per_s
        self._asked_at = time.monotonic()
        self._made: asyncio.Task[T] | None = None

    async def get(self) -> T:
        made = self._made
        if made is None or (made.done() and (self._allowed() or made.cancelled())):
            made = self._made = asyncio.create_task(self._make())
        return await asyncio.shield(made)

    def _allowed(self) -> bool:
        now = time.monotonic()
        self._allowance = min(self._per_s, self._allowance + (now - self._asked_at) * self._per_s)
        self._asked_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True
