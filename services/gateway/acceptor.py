"""Accepts connections from a listening socket, some in each turn of the loop. Each gets a place or is closed at once.

uvicorn leaves this to the loop, which accepts all waiting connections. At the limit on descriptors the loop closes what
it has just accepted, probes too, and reports nothing. Here a descriptor is reserved for each connection that may come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import replace

from services.gateway.connections import Bounds, Connections

log = logging.getLogger(__name__)

_AT_ONCE, _MAX_AT_ONCE = 32, 512
"""How many connections one turn accepts: up to the maximum while places are free, so that a probe behind a crowd comes
soon; else few, because connections that give way must have come in an earlier turn."""
_PAUSE_S = 0.1
RESERVE = 160
"""Descriptors for Redis (64), files, metrics, siblings, and connections that are accepted or closed in one turn."""
_MIN_CONNECTIONS = 16
_UNSENT_BYTES = 16 * 1024
"""How much the kernel holds that is not sent yet: the container pays for it while a peer does not read. Bytes in flight
do not count, so this costs no speed."""
_SILENCE_S = 90
"""A peer that acknowledges nothing for this long is gone: its machine or the network broke."""
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)  # options that this system knows
        for name, value in (
            ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
            ("TCP_USER_TIMEOUT", 1000 * _SILENCE_S),
            ("TCP_KEEPIDLE", _SILENCE_S // 3),
            ("TCP_KEEPINTVL", _SILENCE_S // 9),
        )
        if hasattr(socket, name)
    ),
)


def within_descriptors(bounds: Bounds) -> Bounds:
    """Returns ``bounds`` with as many connections as this process may have descriptors. Raises the soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = bounds.connections + bounds.spare + RESERVE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return bounds
    spare = min(bounds.spare, max(1, (soft - RESERVE) // 4))
    connections = max(_MIN_CONNECTIONS, soft - RESERVE - spare)
    log.warning(
        "allowing %d connections instead of %d: this process may open only %d file descriptors (ulimit -n)",
        connections,
        bounds.connections,
        soft,
    )
    return replace(bounds, connections=connections, spare=spare)


class Acceptor:
    """Accepts from ``listener`` until closed. ``make`` makes a connection's protocol; its argument says whether the
    place is a spare one. uvicorn takes an acceptor for one of its servers."""

    def __init__(
        self, listener: socket.socket, connections: Connections, make: Callable[[bool], asyncio.Protocol]
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._open = True
        self._listen()

    def close(self) -> None:
        self._open = False
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening)

    def _listen(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(max(_AT_ONCE, min(_MAX_AT_ONCE, self._connections.free))):
            try:
                taken, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor in the whole machine, or no memory
                self._connections.refusals.note("accept", f"cannot accept connections: {error}")
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_S, self._listen)
                return
            self._admit(taken)

    def _admit(self, taken: socket.socket) -> None:
        spare = self._connections.place()
        if spare is None:
            taken.close()
            return
        taken.setblocking(False)
        task = self._loop.create_task(self._welcome(taken, spare))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _welcome(self, taken: socket.socket, spare: bool) -> None:
        for option in _OPTIONS:
            with contextlib.suppress(OSError):  # a family that knows no such thing
                taken.setsockopt(*option)
        try:
            await self._loop.connect_accepted_socket(lambda: self._make(spare), taken)
        except OSError as error:  # it has gone already
            log.debug("a connection was closed as it was accepted: %s", error)
            taken.close()
            self._connections.vacate(spare=spare)
