"""All connections of one listener: which get a place, which give way, and which have waited too long.

In: what each connection waits for, and how much its peer has sent (:class:`Tally`). Out: places for new connections,
and ends of connections that take too long.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

from services.gateway.lived_time import LivedTime
from services.gateway.refusals import Refusals
from services.metrics import GatewayMetrics

_KIB = 1024
_ENDED_AT_ONCE = 256
"""Waits that end in one turn of the event loop, in some milliseconds: ten thousand would block every stream for almost
a second."""
_NOTIFIED_AT_ONCE = 32
"""Answers that are notified in one turn of the event loop that their client has gone. Each takes 0.2 ms to end: five
thousand at once would block every probe and stream for a second."""
_CANDIDATES = 16
"""How many of the oldest connections are checked for unread bytes before a new one is turned away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one connection may take, and how many there may be. Sizes are in bytes, times in seconds."""

    connections: int = 10_000
    spare: int = 64
    """Places beyond ``connections`` for probes: a full gateway must not look dead."""
    head_bytes: int = 64 * _KIB
    head_fields: int = 128
    head_s: float = 15.0
    spare_head_s: float = 2.0
    large_head: int = 8 * _KIB
    large_heads: int = 32 * 1024 * _KIB
    """All heads above ``large_head`` together: ten thousand of 64 KiB would take the memory of the whole pod."""
    body_bytes: int = 4 * 1024 * _KIB
    """A body without Content-Length gets the time for this size."""
    body_s: float = 30.0
    min_rate: float = 64.0 * _KIB
    """The bytes per second that a client has to send and read, beyond ``body_s`` and ``stall_s``."""
    framing_bytes: int = 64 * _KIB
    """Chunk headers, their extensions and trailers, beyond an eighth of the body's own bytes."""
    rest_bytes: int = 64 * 1024 * _KIB
    """Bytes of a body whose request was answered before it came, so that nobody reads it."""
    ahead_bytes: int = 16 * _KIB
    ahead_requests: int = 4
    """Bytes and requests sent before the last answer: pipelining, which hardly any client does."""
    write_buffer: int = 16 * _KIB
    stall_s: float = 60.0
    keep_alive_s: float = 75.0
    """Longer than usual proxies keep connections, so that the proxy closes first."""
    closing_s: float = 10.0
    """How long a close may take: the peer reads the answer, and sends the rest of its request."""
    look_s: float = 0.5


class Wait(Enum):
    """What a connection waits for; the value is the label of its gauge."""

    HEAD = "head"
    BODY = "body"
    REST = "rest"  # of a body whose request was answered without it
    IDLE = "idle"
    STALL = "stalled"  # until the peer reads what was written
    CLOSING = "closing"


_GIVING_WAY = (Wait.CLOSING, Wait.HEAD, Wait.REST, Wait.IDLE)
"""Connections that make room for a new one, the oldest first; none that is served."""


class Client(Protocol):
    """A client's connection, as :class:`Connections` needs it."""

    @property
    def unread(self) -> bool:
        """Whether bytes of the peer are in the socket."""
        ...

    @property
    def paused(self) -> bool:
        """Whether this process does not read, so that the peer is not responsible for the wait."""
        ...

    def expire(self, wait: Wait) -> None: ...

    def give_way(self) -> None: ...


class Connections:
    """The places of a listener. :meth:`place` takes a place, :meth:`leave` gives it back."""

    def __init__(self, bounds: Bounds, metrics: GatewayMetrics, listener: str) -> None:
        self.bounds = bounds
        self.refusals = Refusals(metrics)
        self.time = LivedTime(2 * bounds.look_s)
        self._gauges = {wait: metrics.connections.labels(listener, wait.value) for wait in Wait}
        self._served = metrics.connections.labels(listener, "served")
        self._waits: dict[Wait, dict[Client, float]] = {wait: {} for wait in Wait}
        self._graced: set[Client] = set()
        self._large: dict[Client, int] = {}
        self._large_sum = 0
        self._spare: set[Client] = set()
        self._ordinary: set[Client] = set()
        self._coming = {False: 0, True: 0}  # accepted and not entered yet, by whether the place is a spare one
        self._to_notify: deque[Callable[[], None]] = deque()

    @property
    def free(self) -> int:
        """How many ordinary places are free."""
        return self.bounds.connections - self._count(spare=False)

    def place(self) -> bool | None:
        """Takes a place for an accepted connection: False is an ordinary place, True a spare one, which serves probes
        only, None no place. Where all are taken the oldest connection that is not served gives way."""
        if self._count(spare=False) < self.bounds.connections or self._make_room(self._ordinary):
            spare = False
        elif self._count(spare=True) < self.bounds.spare or self._make_room(self._spare):
            spare = True
        else:
            self.refusals.note("full", "the connection limit and its reserve are reached: closed a new connection")
            return None
        self._coming[spare] += 1
        return spare

    def vacate(self, *, spare: bool) -> None:
        """Gives back the place of a connection that ended before :meth:`enter`."""
        self._coming[spare] -= 1

    def enter(self, client: Client, *, spare: bool) -> None:
        """Enters the connection that :meth:`place` took a place for."""
        self._coming[spare] -= 1
        (self._spare if spare else self._ordinary).add(client)

    def leave(self, client: Client) -> None:
        for wait in Wait:
            self.done(client, wait)
        self.forget_head(client)
        self._ordinary.discard(client)
        self._spare.discard(client)

    def notify_soon(self, notify: Callable[[], None]) -> None:
        """Calls ``notify``, by which an answer learns that its client has gone, after those of earlier calls. Only a
        few are called in each turn of the event loop."""
        self._to_notify.append(notify)
        if len(self._to_notify) == 1:
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        batch = [self._to_notify.popleft() for _ in range(min(_NOTIFIED_AT_ONCE, len(self._to_notify)))]
        if self._to_notify:
            asyncio.get_running_loop().call_soon(self._notify)
        for notify in batch:
            notify()

    def wait(self, client: Client, wait: Wait, seconds: float) -> None:
        """Gives ``client`` this many seconds, from now, for ``wait``."""
        self._waits[wait][client] = self.time.now() + seconds

    def done(self, client: Client, wait: Wait) -> None:
        if self._waits[wait].pop(client, None) is not None:
            self._graced.discard(client)

    def hold_head(self, client: Client, size: int) -> bool:
        """Counts the bytes of a large head until :meth:`forget_head`. False: all large heads together take too many."""
        if size <= self.bounds.large_head:
            return True
        self._large_sum += size - self._large.get(client, 0)
        self._large[client] = size
        return self._large_sum <= self.bounds.large_heads

    def forget_head(self, client: Client) -> None:
        self._large_sum -= self._large.pop(client, 0)

    async def watch(self) -> None:
        """Ends waits until cancelled."""
        pause_s = self.bounds.look_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = 0.0 if self.look() else self.bounds.look_s

    def look(self) -> bool:
        """Ends waits that are over. Returns whether more of them remain."""
        now = self.time.tick()
        over = [(client, wait) for wait, dues in self._waits.items() for client, due in dues.items() if due <= now]
        for client, wait in over[:_ENDED_AT_ONCE]:
            if self._waits[wait].get(client, math.inf) <= now:  # else it has ended with another wait
                self._end(client, wait, now)
        self._report_counts()
        return len(over) > _ENDED_AT_ONCE

    def _end(self, client: Client, wait: Wait, now: float) -> None:
        if self._excused(client, wait):
            self._waits[wait][client] = now + self.bounds.look_s
        else:
            del self._waits[wait][client]
            client.expire(wait)

    def _excused(self, client: Client, wait: Wait) -> bool:
        """Says whether the wait goes on: bytes that have come and are not read yet were in time, and are read until the
        next look."""
        if wait is Wait.BODY and client.paused:
            return True
        if wait in (Wait.STALL, Wait.CLOSING) or client in self._graced or not client.unread:
            return False
        self._graced.add(client)
        return True

    def _count(self, *, spare: bool) -> int:
        return len(self._spare if spare else self._ordinary) + self._coming[spare]

    def _make_room(self, among: set[Client]) -> bool:
        for wait in _GIVING_WAY:
            client = next(self._can_give_way(wait, among), None)
            if client is not None:
                self.leave(client)
                self.refusals.note(f"gave_way_{wait.value}", "the connection limit is reached: closed the oldest")
                client.give_way()
                return True
        return False

    def _can_give_way(self, wait: Wait, among: set[Client]) -> Iterator[Client]:
        oldest = (client for client in self._waits[wait] if client in among)
        return (client for client in islice(oldest, _CANDIDATES) if wait is Wait.CLOSING or not client.unread)

    def _report_counts(self) -> None:
        for wait, clients in self._waits.items():
            self._gauges[wait].set(len(clients))
        reading = sum(len(self._waits[wait]) for wait in Wait if wait is not Wait.STALL)
        self._served.set(max(0, len(self._ordinary) + len(self._spare) - reading))


_CONTENT_SHARE = 8
"""Bytes of a body for each byte of its framing: with fewer, as in chunks of five bytes, the parser takes too long."""


class Tally:
    """Counts what a peer has sent. Methods that return a bool say whether that is too much."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.head_bytes = self.head_fields = 0
        self._earlier_heads = 0  # bytes of earlier heads, while any of them is in flight
        self._wire_bytes = self._body_bytes = 0  # of a body with its framing, and without
        self._ahead_bytes = self._thrown_away = 0

    @property
    def heads_bytes(self) -> int:
        """Bytes of all heads in flight."""
        return self._earlier_heads + self.head_bytes

    def begin_head(self) -> None:
        self._earlier_heads += self.head_bytes
        self.head_bytes = self.head_fields = 0

    def begin_body(self) -> None:
        self._wire_bytes = self._body_bytes = 0

    def rest(self) -> None:
        """Notes that nothing is in flight."""
        self._ahead_bytes = self._earlier_heads = self.head_bytes = 0

    def head(self, size: int) -> bool:
        self.head_bytes += size
        return self.head_bytes > self._bounds.head_bytes

    def field(self) -> bool:
        """Counts one more field, of the head or behind the body."""
        self.head_fields += 1
        return self.head_fields > self._bounds.head_fields

    def content(self, size: int) -> None:
        """Counts bytes of a body without its framing."""
        self._body_bytes += size

    def framing(self, size: int) -> bool:
        """Counts ``size`` more bytes of a body with its framing, of which there may be too much."""
        self._wire_bytes += size
        return self._wire_bytes - self._body_bytes > self._bounds.framing_bytes + self._body_bytes // _CONTENT_SHARE

    def unwanted(self) -> bool:
        """Says whether too much has come of a body that nobody reads."""
        return self._wire_bytes > self._bounds.rest_bytes

    def ahead(self, size: int) -> bool:
        self._ahead_bytes += size
        return self._ahead_bytes > self._bounds.ahead_bytes

    def throw_away(self, size: int) -> bool:
        self._thrown_away += size
        return self._thrown_away > self._bounds.rest_bytes
