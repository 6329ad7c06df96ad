"""All connections of one listener: who gets a place, who gives way, and whose time is over.

In: what each connection waits for, and how much its peer has sent (:class:`Tally`). Out: refusals of those that take
too long, and places for those who come.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

from services.gateway.lived_time import LivedTime
from services.gateway.refusals import Refusals
from services.metrics import GatewayMetrics

_KIB = 1024
_ENDED_AT_ONCE = 256
"""Waits that end in one turn of the event loop, in some milliseconds: ten thousand would hold up every stream for most
of a second."""
_CANDIDATES = 16
"""Oldest ones that are asked whether something of theirs is still unread, before a newcomer is turned away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one connection may take, and how many there may be. Sizes in bytes, times in seconds."""

    connections: int = 10_000
    spare: int = 64
    """Beyond ``connections``, for whoever asks how the gateway is: a full one is not a dead one."""
    head_bytes: int = 64 * _KIB
    head_fields: int = 128
    head_s: float = 15.0
    spare_head_s: float = 2.0
    large_head: int = 8 * _KIB
    large_heads: int = 32 * 1024 * _KIB
    """All heads above ``large_head`` together: ten thousand of 64 KiB would be the memory of the whole pod."""
    body_bytes: int = 4 * 1024 * _KIB
    """What a body without Content-Length is given time for."""
    body_s: float = 30.0
    least_rate: float = 64.0 * _KIB
    """Bytes per second that a client sends and reads at, beyond ``body_s`` and ``stall_s``."""
    framing_bytes: int = 64 * _KIB
    """Chunk headers, their extensions and trailers, beyond an eighth of the bytes that the body itself has."""
    rest_bytes: int = 64 * 1024 * _KIB
    """Of a body that nobody reads: it was answered before it came."""
    ahead_bytes: int = 16 * _KIB
    ahead_requests: int = 4
    """Sent before the answer to the request before: pipelining, which hardly any client does."""
    write_buffer: int = 16 * _KIB
    stall_s: float = 60.0
    keep_alive_s: float = 75.0
    """Longer than usual proxies keep theirs, so that they close first."""
    closing_s: float = 10.0
    """From the close to its end: the peer reads what it was told, and sends the rest of what it was sending."""
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
"""Who makes room for a newcomer, the oldest first: nobody who is served."""


class Client(Protocol):
    """A connection, as far as it is known here."""

    @property
    def unread(self) -> bool:
        """Whether bytes of the peer are in the socket."""
        ...

    @property
    def paused(self) -> bool:
        """Whether this process is not reading: the wait is not the peer's fault."""
        ...

    def expire(self, wait: Wait) -> None: ...

    def give_way(self) -> None: ...


class Connections:
    """The places of a listener. A place is taken by :meth:`place`, and given back by :meth:`leave`."""

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
        self._coming = {False: 0, True: 0}  # accepted, and no client yet, by whether the place is a spare one

    @property
    def free(self) -> int:
        """Ordinary places that nobody has."""
        return self.bounds.connections - self._count(spare=False)

    def place(self) -> bool | None:
        """Takes a place for a connection that was accepted: False is an ordinary one, True a spare one that only says
        how the gateway is, None none at all. Where all are taken the oldest of those that are not served give way."""
        if self._count(spare=False) < self.bounds.connections or self._make_room(self._ordinary):
            spare = False
        elif self._count(spare=True) < self.bounds.spare or self._make_room(self._spare):
            spare = True
        else:
            self.refusals.note("full", "all places for connections are taken, the spare ones too: closed a new one")
            return None
        self._coming[spare] += 1
        return spare

    def vacate(self, *, spare: bool) -> None:
        """The connection of a place came to nothing."""
        self._coming[spare] -= 1

    def enter(self, client: Client, *, spare: bool) -> None:
        """``client`` is the connection that :meth:`place` was asked for."""
        self._coming[spare] -= 1
        (self._spare if spare else self._ordinary).add(client)

    def leave(self, client: Client) -> None:
        for wait in Wait:
            self.done(client, wait)
        self.forget_head(client)
        self._ordinary.discard(client)
        self._spare.discard(client)

    def wait(self, client: Client, wait: Wait, seconds: float) -> None:
        """From now on ``client`` has so long."""
        self._waits[wait][client] = self.time.now() + seconds

    def done(self, client: Client, wait: Wait) -> None:
        if self._waits[wait].pop(client, None) is not None:
            self._graced.discard(client)

    def hold_head(self, client: Client, size: int) -> bool:
        """Counts the bytes of a large head until :meth:`forget_head`. False: all large heads together are too many."""
        if size <= self.bounds.large_head:
            return True
        self._large_sum += size - self._large.get(client, 0)
        self._large[client] = size
        return self._large_sum <= self.bounds.large_heads

    def forget_head(self, client: Client) -> None:
        self._large_sum -= self._large.pop(client, 0)

    async def watch(self) -> None:
        """Until cancelled."""
        pause_s = self.bounds.look_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = 0.0 if self.look() else self.bounds.look_s

    def look(self) -> bool:
        """Ends waits that are over; whether there are more of them."""
        now = self.time.tick()
        over = [
            (client, wait) for wait, clients in self._waits.items() for client, due in clients.items() if due <= now
        ]
        for client, wait in over[:_ENDED_AT_ONCE]:
            if self._waits[wait].get(client, math.inf) <= now:  # else another one's end was its own
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
        """What has come and is not read was in time; it is read before the next look."""
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
                self.refusals.note(f"gave_way_{wait.value}", "all places for connections are taken: closed the oldest")
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
"""Bytes of a body for each of its framing: with less, as in chunks of five bytes, the parser is most of the work."""


class Tally:
    """Counts. What returns a bool says whether that is too much."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.head_bytes = self.head_fields = 0
        self._earlier_heads = 0  # bytes of those before it, while any of them is under way
        self._wire_bytes = self._body_bytes = 0  # of a body as it was sent, and as it is meant
        self._ahead_bytes = self._thrown_away = 0

    @property
    def heads_bytes(self) -> int:
        """Of all heads that are under way."""
        return self._earlier_heads + self.head_bytes

    def begin_head(self) -> None:
        self._earlier_heads += self.head_bytes
        self.head_bytes = self.head_fields = 0

    def begin_body(self) -> None:
        self._wire_bytes = self._body_bytes = 0

    def rest(self) -> None:
        """Nothing is under way."""
        self._ahead_bytes = self._earlier_heads = self.head_bytes = 0

    def head(self, size: int) -> bool:
        self.head_bytes += size
        return self.head_bytes > self._bounds.head_bytes

    def field(self) -> bool:
        """One more, of the head or behind the body."""
        self.head_fields += 1
        return self.head_fields > self._bounds.head_fields

    def content(self, size: int) -> None:
        """Of a body, as it is meant."""
        self._body_bytes += size

    def framing(self, size: int) -> bool:
        """``size`` more bytes of a body as it was sent; too much of them are not its own."""
        self._wire_bytes += size
        return self._wire_bytes - self._body_bytes > self._bounds.framing_bytes + self._body_bytes // _CONTENT_SHARE

    def unwanted(self) -> bool:
        """What came of a body that nobody reads."""
        return self._wire_bytes > self._bounds.rest_bytes

    def ahead(self, size: int) -> bool:
        self._ahead_bytes += size
        return self._ahead_bytes > self._bounds.ahead_bytes

    def throw_away(self, size: int) -> bool:
        self._thrown_away += size
        return self._thrown_away > self._bounds.rest_bytes
