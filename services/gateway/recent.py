"""What is dear to make, and asked for by anybody: made at most so often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The result of ``make``, at most ``for_s`` old. All who ask while it is made get the same one, or its error."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], for_s: float) -> None:
        self._make = make
        self._for_s = for_s
        self._made: asyncio.Task[T] | None = None
        self._good_until = 0.0

    async def get(self) -> T:
        if self._made is None or (self._made.done() and time.monotonic() >= self._good_until):
            self._made = asyncio.create_task(self._make())
            self._made.add_done_callback(self._note)
        return await asyncio.shield(self._made)

    def _note(self, made: asyncio.Task[T]) -> None:
        failed = made.cancelled() or made.exception() is not None
        self._good_until = 0.0 if failed else time.monotonic() + self._for_s
