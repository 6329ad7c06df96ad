"""Says in Redis that this gateway's process lives, from a thread of its own.

Whatever holds the event loop up, such as a long answer that is encoded, thus costs no lease: streams are late, and not
lost. Whether the loop lives is another question, which /health answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from services.errors import ExpertMeshError

BEATS_PER_LEASE = 4
MAX_PAUSE_S = 1.0
STUCK_S = 300.0
"""For so long a loop that gives no sign is held for busy; then its requests go to whoever asks for them."""

log = logging.getLogger(__name__)
Beat = Callable[[], Coroutine[Any, Any, None]]


class HeartbeatThread:
    """``session`` runs in the thread, on its own event loop: it opens what a beat needs, and hands the beat to what
    it is given, which returns at the end."""

    def __init__(
        self,
        session: Callable[[Callable[[Beat], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]],
        *,
        lease_s: float,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._pause_s = min(MAX_PAUSE_S, lease_s / BEATS_PER_LEASE)
        self._stuck_s = stuck_s
        self._clock = clock
        self._seen = clock()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()  # of that loop
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tick(self) -> None:
        """The event loop lives."""
        self._seen = self._clock()

    async def stop(self) -> None:
        """Returns when the thread is over: nothing is told after this."""
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._session(self._keep))
        except Exception:
            log.exception("nobody tells Redis any more that this gateway lives while its event loop is busy")

    async def _keep(self, beat: Beat) -> None:
        while not self._over.is_set():
            if self._clock() - self._seen < self._stuck_s:
                try:
                    await beat()
                except ExpertMeshError as error:  # the event loop meets the same, and acts on it
                    log.debug("no heartbeat: %s", error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._over.wait()
