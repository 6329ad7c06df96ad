"""uvicorn as this process runs it: on a socket that is already bound, without signals, drained before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.errors import Draining, PortInUse
from services.gateway.intake import Intake
from services.gateway.results import ResultFollower
from services.gateway.table import JobTable

log = logging.getLogger(__name__)

_BACKLOG = 2048
_LAST_WORDS_S = 2.0  # for the error events of streams that the drain cut off
_LATE_S = 0.2  # for requests that had come when idle connections were closed
_LOOK_S = 0.05
_MOST_DELAYS = 3
_KEEP_ALIVE_S = 75  # longer than usual proxies keep theirs, so that they close first


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortInUse where the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortInUse(f"Cannot resolve {host}: {error.strerror or error}.", hint="Choose another --host.") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"Cannot listen on {host}:{port} ({error.strerror or error}).",
            hint="Stop the process that uses it, or choose another --port.",
        ) from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Signals are the caller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves ``app`` on ``listener``."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(_LAST_WORDS_S),
            )
        )

    async def run(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def close_idle(self, idle_s: float) -> int:
        """Closes connections that have waited ``idle_s`` for another request. Those whose first or next one is on its
        way, and new ones, are served.

        Returns:
            How many remain on which an answer said, or may have, that the next request can come here: its head went
            out before the app began to add ``Connection: close``.
        """
        for connection in list(self._server.server_state.connections):
            if _waits_s(connection) >= idle_s and not _unread(connection):
                connection.shutdown()
        return sum(_stays(connection) for connection in self._server.server_state.connections)

    def stop(self) -> None:
        """Closes the listener and idle connections; :meth:`run` returns when open ones are done."""
        self._server.should_exit = True


def _waits_s(connection: Any) -> float:
    """How long it has waited for another request (uvicorn's httptools protocol); -1: it does not, or had none yet."""
    timer = connection.timeout_keep_alive_task
    if connection.cycle is None or not connection.cycle.response_complete or timer is None:
        return -1.0
    began: float = timer.when() - connection.timeout_keep_alive
    return asyncio.get_running_loop().time() - began


def _stays(connection: Any) -> bool:
    """Whether it outlives the answer whose head it has sent. One that has no timer afterwards got something that is no
    request, and nobody waits for it."""
    cycle = connection.cycle
    if cycle is None or not cycle.response_started or connection.transport.is_closing():
        return False
    waits = not cycle.response_complete or connection.timeout_keep_alive_task is not None
    return bool(cycle.keep_alive and waits)


def _unread(connection: Any) -> bool:
    """Whether bytes wait in its socket: to close it now would break a request that a client has sent."""
    socket_ = connection.transport.get_extra_info("socket")
    if socket_ is None:
        return False
    waiting = select.poll()
    waiting.register(socket_.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


class Drain:
    """The end of a gateway. For ``delay_s`` it takes requests, but says that it leaves: not ready, and each answer
    closes its connection. While requests keep coming it goes on, up to :data:`_MOST_DELAYS` times as long: who sends
    them has not heard yet. Then ``close_idle``, for a request on a connection that was kept would come here whatever
    the cluster has heard. An answer that had begun before may be followed by a request on its connection: it goes on
    until these are idle, and closed, too, half of ``timeout_s`` at most. Then no new requests, what is left of that
    time for the open ones, and a typed error for those that remain."""

    def __init__(
        self,
        intake: Intake,
        table: JobTable,
        follower: ResultFollower,
        timeout_s: float,
        delay_s: float = 0.0,
        *,
        close_idle: Callable[[float], int],
    ) -> None:
        self._intake = intake
        self._table = table
        self._follower = follower
        self._timeout_s = timeout_s
        self._delay_s = delay_s
        self._close_idle = close_idle

    async def run(self) -> None:
        """Returns when every job has ended."""
        self._intake.leaving = True
        await self._until_quiet()
        began = time.monotonic()
        await self._until_told(began + self._timeout_s / 2)
        self._intake.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, began + self._timeout_s - time.monotonic())):
                await self._table.idle.wait()
        left = self._table.jobs()
        error = Draining("This server is shutting down.", hint="Send the request again.", retry_after_s=1.0)
        for job in left:
            if job.keyed:  # goes on upstream, for the client to take up elsewhere with its Idempotency-Key
                self._table.discard(job)
                job.end(error)
            else:
                self._follower.fail(job, error)
        await self._follower.cancels_heard(set())
        if left:
            log.warning("shutting down with %d requests unfinished", len(left))

    async def _until_told(self, latest: float) -> None:
        """No connection is left on which a client may expect to be served, or none but those that take nothing any
        more; without a delay nobody is waited for."""
        least_s = min(_LATE_S, self._delay_s)
        kept, busy_at = self._close_idle(least_s), time.monotonic()
        while kept and self._delay_s and (now := time.monotonic()) < min(latest, busy_at + _LAST_WORDS_S):
            if not self._table.idle.is_set():
                busy_at = now
            await asyncio.sleep(_LOOK_S)
            kept = self._close_idle(least_s)
        await asyncio.sleep(least_s)  # for a request that has come and is not read yet

    async def _until_quiet(self) -> None:
        """Half of the delay without a request is quiet."""
        began = time.monotonic()
        latest, ends = began + _MOST_DELAYS * self._delay_s, began + self._delay_s
        while (left := min(ends, latest) - time.monotonic()) > 0:
            await asyncio.sleep(left)
            ends = max(ends, self._intake.asked_at + self._delay_s / 2)
