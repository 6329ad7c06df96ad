"""Checks of a POST before any work: the key, this gateway's room, the rate, the size; then its body is read.

In: a request whose head has come. Out: the caller and the typed body. Cheap checks come first: the body of a client
without a key, or of a tenant beyond its limits, is not read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request

from services.errors import BodyTooLarge, InvalidRequest, Overloaded, WorkLimited
from services.gateway.access import note_of
from services.gateway.auth import Authenticator, Caller
from services.gateway.middleware import until_answered
from services.gateway.offload import Offload
from services.gateway.parse import B, Parser
from services.gateway.ports import Queue
from services.metrics import GatewayMetrics
from services.runtime import bind_tenant

_RETRY_S = 1.0


class Room:
    """Room for up to ``total`` of ``what`` at a time, and up to ``share`` for one tenant. ``report`` is called with the
    amount that is taken, whenever it changes."""

    def __init__(self, what: str, total: int, share: int, report: Callable[[float], None]) -> None:
        self._what = what
        self._total = total
        self._share = share
        self._report = report
        self._held: dict[str, int] = {}
        self._sum = 0

    def open(self, tenant: str) -> Hold:
        """Returns a hold for ``tenant``, empty at first; closing it gives back what it took."""
        return Hold(self, tenant)

    def take(self, tenant: str, amount: int) -> None:
        """Raises WorkLimited where ``amount`` exceeds the tenant's share, Overloaded where it exceeds the total."""
        held = self._held.get(tenant, 0)
        if held + amount > self._share:
            raise WorkLimited(
                f"This key has {held} {self._what} in flight on this gateway; the maximum is {self._share}.",
                hint="Send fewer at a time.",
                retry_after_s=_RETRY_S,
            )
        if self._sum + amount > self._total:
            raise Overloaded(
                f"This gateway has {self._sum} {self._what} in flight; the maximum is {self._total}.",
                hint="Try again soon.",
                retry_after_s=_RETRY_S,
            )
        self._change(tenant, amount)

    def give_back(self, tenant: str, amount: int) -> None:
        self._change(tenant, -amount)

    def _change(self, tenant: str, amount: int) -> None:
        self._sum += amount
        left = self._held.pop(tenant, 0) + amount
        if left:
            self._held[tenant] = left
        self._report(self._sum)


class Hold:
    """A tenant's part of a room. It grows while it is open."""

    def __init__(self, room: Room, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Grows to ``amount`` in all, unless it is larger already. Raises as :meth:`Room.take`."""
        if amount > self._amount:
            self._room.take(self._tenant, amount - self._amount)
            self._amount = amount

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        if self._amount:
            self._room.give_back(self._tenant, self._amount)
            self._amount = 0


_FREE_BYTES = 16 * 1024
"""Bodies up to this size need no room: ten thousand of them take a sixth of the memory that the chart gives."""
_INLINE_BYTES = 64 * 1024
"""Longer bodies are parsed in a thread."""
_BODY_BYTES = 64 * 1024 * 1024
_BODIES_OF_ONE = 4  # tenants that can fill the room between them
_REQUESTS_OF_ONE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Rooms:
    """The rooms of this process: requests and bodies in flight."""

    requests: Room
    bodies: Room

    @classmethod
    def of(
        cls, metrics: GatewayMetrics, *, connections: int, shared: bool, max_body: int, body_bytes: int = _BODY_BYTES
    ) -> Rooms:
        """Returns the rooms of a gateway with this many ``connections``. Without keys (not ``shared``) all clients are
        one tenant, who may take everything."""
        requests_share = max(1, connections // _REQUESTS_OF_ONE) if shared else connections
        bodies_share = max(body_bytes // _BODIES_OF_ONE, max_body) if shared else body_bytes
        return cls(
            requests=Room("requests", connections, requests_share, metrics.http_in_flight.set),
            bodies=Room("bytes of request bodies", max(body_bytes, max_body), bodies_share, metrics.body_bytes.set),
        )


class Guard:
    """Admits requests to the routes."""

    def __init__(
        self, *, authenticator: Authenticator, queue: Queue, rooms: Rooms, offload: Offload, max_body_bytes: int
    ) -> None:
        self._authenticator = authenticator
        self._queue = queue
        self._rooms = rooms
        self._offload = offload
        self._limit = max_body_bytes

    async def enter(self, request: Request) -> Caller:
        """Returns the caller, charged with ``request``. The request keeps its room until it is answered.

        Raises:
            Unauthorized: no key, or an unknown one.
            WorkLimited, Overloaded: this tenant, or all tenants, have too many requests in flight.
            RateLimited: the key sends more requests than it may.
        """
        caller = await self._authenticator.identify(request.headers.get("authorization"))
        note_of(request.scope).tenant = caller.tenant
        bind_tenant(caller.tenant)
        place = until_answered(request.scope).enter_context(self._rooms.requests.open(caller.tenant))
        place.grow(1)
        if caller.limits is not None and caller.limits.requests_per_minute is not None:
            await self._queue.charge(caller.tenant, caller.limits)
        return caller

    @asynccontextmanager
    async def body(self, parser: Parser[B], request: Request, caller: Caller) -> AsyncIterator[B]:
        """Yields ``request``'s body; its bytes keep room until the block ends. Raises the fault of a wrong body."""
        declared = self._declared(request)
        with self._rooms.bodies.open(caller.tenant) as hold:
            hold.grow(_need(declared))
            yield await self._parse(parser, await self._read(request, hold), caller.tenant)

    async def _parse(self, parser: Parser[B], raw: bytearray, tenant: str) -> B:
        if len(raw) <= _INLINE_BYTES:
            return parser.parse(raw)
        return await self._offload.run(tenant, lambda: parser.parse(raw))

    def hold(self, request: Request, caller: Caller, size: int) -> None:
        """Takes room for an answer of ``size`` bytes until the client has read it."""
        room = until_answered(request.scope).enter_context(self._rooms.bodies.open(caller.tenant))
        room.grow(_need(size))

    def _declared(self, request: Request) -> int:
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise InvalidRequest(
                f"Content-Encoding {coding[:40]!r} is not supported.", hint="Send plain JSON, uncompressed."
            )
        length = request.headers.get("content-length", "")
        declared = int(length) if length.isdecimal() and len(length) < 20 else 0
        if declared > self._limit:
            raise self._too_large()
        return declared

    async def _read(self, request: Request, hold: Hold) -> bytearray:
        body = bytearray()
        async for piece in request.stream():
            if len(body) + len(piece) > self._limit:
                raise self._too_large()
            body += piece
            hold.grow(_need(len(body)))
        return body

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body exceeds {self._limit} bytes.", hint="Send less, or raise --max-body-bytes.")


def _need(size: int) -> int:
    return size if size > _FREE_BYTES else 0
