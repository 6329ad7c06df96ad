"""uvicorn as this process runs it: on a bound socket, without signals, drained before it ends.

In: an app and a listener. Out: answers to connections that have a place (:class:`Connections`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Generator, Iterator

import uvicorn
from starlette.types import ASGIApp

from services.errors import Draining, PortInUse
from services.gateway.acceptor import Acceptor
from services.gateway.connection import Connection
from services.gateway.connections import Connections
from services.gateway.intake import Intake
from services.gateway.middleware import ProbesOnly
from services.gateway.results import ResultFollower
from services.gateway.table import JobTable

log = logging.getLogger(__name__)

_BACKLOG = 8192  # the system may lower it; a probe beyond it comes again after a second
_LAST_WORDS_S = 2.0  # for the error events of streams that the drain ended
_LATE_S = 0.2  # for requests that had come when idle connections were closed
_LOOK_S = 0.05
_MAX_DELAYS = 3
_BUFFER_BYTES = 256 * 1024
"""The kernel's buffer, each way. The container pays for it; by default it grows to 6 MB for a connection."""


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises PortInUse where the address is taken or not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortInUse(f"Cannot resolve {host}: {error.strerror or error}.", hint="Choose another --host.") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # accepted sockets inherit them
        listener.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"Cannot listen on {host}:{port} ({error.strerror or error}).",
            hint="Stop the process that uses the port, or choose another --port.",
        ) from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; an :class:`Acceptor` accepts its connections."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        probes = ProbesOnly(self.config.loaded_app)

        def make(spare: bool) -> Connection:
            return Connection(
                self.config,
                self.server_state,
                self.lifespan.state,
                connections=self._connections,
                spare=spare,
                probes=probes,
            )

        acceptors = [Acceptor(listener, self._connections, make) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment] # uvicorn closes each, and waits for it
        self.started = True


class HttpServer:
    """Serves ``app`` on ``listener`` to clients that have a place among ``connections``."""

    def __init__(self, app: ASGIApp, listener: socket.socket, connections: Connections) -> None:
        self._listener = listener
        self._connections = connections
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
                timeout_graceful_shutdown=int(_LAST_WORDS_S),
            ),
            connections,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._connections.watch())
            await self._server.serve(sockets=[self._listener])
            watching.cancel()

    def close_idle(self, idle_s: float) -> int:
        """Closes connections that have waited ``idle_s`` for another request. New connections, and connections whose
        request is coming, are served.

        Returns:
            How many open connections have an answer without ``Connection: close``, so that their clients may send the
            next request here.
        """
        for connection in list(self._open()):
            if connection.waited_s >= idle_s and not connection.unread:
                connection.shutdown()
        return sum(connection.stays for connection in self._open())

    def stop(self) -> None:
        """Closes the listener and idle connections; :meth:`run` returns when open ones are done."""
        self._server.should_exit = True

    def _open(self) -> Iterator[Connection]:
        return (one for one in self._server.server_state.connections if isinstance(one, Connection))


class Drain:
    """Graceful shutdown, in four phases:

    1. For ``delay_s``, or up to :data:`_MAX_DELAYS` times as long while requests still arrive: serve, report not ready,
       and send ``Connection: close`` with each answer, so that load balancers and clients go elsewhere.
    2. Close idle connections (``close_idle``): a client that kept one would send its next request here.
    3. For at most half of ``timeout_s``: wait for connections whose answers began before phase 1, and close them, too.
    4. Refuse new requests, wait for open ones until ``timeout_s``, and end the rest with :class:`Draining`."""

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
        """Drains, and returns when every job has ended."""
        self._intake.leaving = True
        await self._until_quiet()
        began = time.monotonic()
        await self._until_idle(began + self._timeout_s / 2)
        self._intake.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, began + self._timeout_s - time.monotonic())):
                await self._table.idle.wait()
        left = self._table.jobs()
        error = Draining("This server is shutting down.", hint="Send the request again.", retry_after_s=1.0)
        for job in left:
            if job.keyed:  # it goes on upstream: its client may return to it at another gateway
                self._table.discard(job)
                job.end(error)
            else:
                self._follower.fail(job, error)
        await self._follower.cancels_heard(set())
        if left:
            log.warning("shutting down; unfinished requests: %d", len(left))

    async def _until_idle(self, latest: float) -> None:
        """Runs phases 2 and 3: returns when no kept connection is left, or when none has had a request for a while.
        Without a delay it does not wait."""
        least_s = min(_LATE_S, self._delay_s)
        kept, busy_at = self._close_idle(least_s), time.monotonic()
        while kept and self._delay_s and (now := time.monotonic()) < min(latest, busy_at + _LAST_WORDS_S):
            if not self._table.idle.is_set():
                busy_at = now
            await asyncio.sleep(_LOOK_S)
            kept = self._close_idle(least_s)
        await asyncio.sleep(least_s)  # for requests that have come and are not read yet

    async def _until_quiet(self) -> None:
        """Runs phase 1: returns after the delay, and after half of it without a request."""
        began = time.monotonic()
        latest, ends = began + _MAX_DELAYS * self._delay_s, began + self._delay_s
        while (left := min(ends, latest) - time.monotonic()) > 0:
            await asyncio.sleep(left)
            ends = max(ends, self._intake.asked_at + self._delay_s / 2)
