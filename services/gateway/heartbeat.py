"""Heartbeats of this gateway's process to Redis, from a thread of its own.

Work that blocks the event loop, such as encoding a long answer, thus costs no lease: streams are late, and not lost.
/health says whether the loop itself runs.
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
"""An event loop that does nothing for this long counts as stuck: heartbeats stop, and other gateways may take over."""

log = logging.getLogger(__name__)
Beat = Callable[[], Coroutine[Any, Any, None]]


class HeartbeatThread:
    """Sends heartbeats until :meth:`stop`. ``session`` runs in the thread, on its own event loop: it opens a connection
    and passes the coroutine function that sends one heartbeat to its argument, which returns at the end."""

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
        """Notes that the event loop runs."""
        self._seen = self._clock()

    async def stop(self) -> None:
        """Ends the thread: no heartbeat is sent afterwards."""
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._session(self._keep))
        except Exception:
            log.exception("the heartbeat thread failed: no heartbeats will be sent while the event loop is busy")

    async def _keep(self, beat: Beat) -> None:
        while not self._over.is_set():
            if self._clock() - self._seen < self._stuck_s:
                try:
                    await beat()
                except ExpertMeshError as error:  # the event loop gets the same error, and acts on it
                    log.debug("cannot send a heartbeat: %s", error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._over.wait()
