"""Plain ASGI around the app, which every HTTP request passes: its id, log line and count, checks of its host, its turn.

A few requests begin in each turn of the event loop, tenants in rotation (:class:`Turns`). So however many heads have
come at once, each turn leaves time for open streams, replies of Redis and probes, and a tenant waits for one request of
each other tenant, not for all that were sent before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.errors import Forbidden, InternalError, Overloaded, RequestError, WrongContentType
from services.gateway.access import Note
from services.gateway.auth import is_loopback
from services.gateway.errors_http import error_response
from services.gateway.objectives import Objectives
from services.metrics import GatewayMetrics
from services.request_ids import RequestIds
from services.runtime import bind_request_id

log = logging.getLogger(__name__)

_QUIET = ("/health", "/ready", "/accepting", "/metrics")
_GENERATION = ("/v1/completions", "/v1/chat/completions")
_UNTIL_ANSWERED = "expertmesh.until_answered"
_FULL_RETRY_S = 2.0


def until_answered(scope: Scope) -> ExitStack:
    """Returns a stack that closes when the request is answered, or its client has left."""
    stack: ExitStack = scope[_UNTIL_ANSWERED]
    return stack


class RequestContext:
    """The outermost middleware: gives the request its id, counts and logs it, and answers 500 where the app crashes.
    While ``leaving`` each answer closes its connection, so that the client's next one reaches another gateway. An error
    for a client that waits for a 100 closes it, too, for the client may or may not send its body."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, leaving: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._metrics = metrics
        self._objectives = Objectives(metrics)
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        ids, status, began = RequestIds.of(headers.get("x-request-id", "")), 0, time.monotonic()
        note = Note(ids)
        note.under(scope)
        hesitant = headers.get("expect", "").lower() == "100-continue"

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = ids.request_id
                if self._leaving() or (hesitant and status >= 400):
                    answered["connection"] = "close"
            await send(message)

        with bind_request_id(ids.request_id), ExitStack() as scope[_UNTIL_ANSWERED]:
            try:
                await self._app(scope, receive, send_marked)
            except ClientDisconnect:
                log.info("the client disconnected before its request was complete")
            except Exception:
                log.exception("request failed")
                if not status:
                    answer = error_response(InternalError("The server failed.", hint="Its log has the details."))
                    await answer(scope, receive, send_marked)
            finally:
                self._record(scope, note, status or 499, time.monotonic() - began)

    def _record(self, scope: Scope, note: Note, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.http_requests.labels(route, str(status)).inc()
        if route in _GENERATION and note.job is None:
            self._objectives.refused(status)
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request", extra=note.fields(scope, status=status, seconds=seconds))


class RoundRobin:
    """Makes requests wait for their turn, tenants in rotation; probes do not wait. ``tenant_of`` finds the tenant of an
    ``Authorization`` header."""

    def __init__(self, app: ASGIApp, turns: Turns, tenant_of: Callable[[str | None], str]) -> None:
        self._app = app
        self._turns = turns
        self._tenant_of = tenant_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_probe(scope):
            await self._turns.take(self._tenant_of(Headers(scope=scope).get("authorization")))
        await self._app(scope, receive, send)


class SameMachine:
    """Refuses requests of web pages to a gateway without keys that only this machine reaches.

    A page's own requests name the page's host, even if its DNS name points to loopback, and the browser lets the page
    send JSON to another host only if that host allows it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if host is not None and not is_loopback(_host_of(host)):
            return Forbidden(
                "Without API keys this server answers only requests to localhost or a loopback address.",
                hint="Use http://127.0.0.1, or start it with --auth required.",
            )
        if scope["method"] == "POST" and _media_type(headers) != "application/json" and not _of_no_page(headers):
            return WrongContentType(
                "The request's body must be JSON.", hint="Send the header 'Content-Type: application/json'."
            )
        return None


def _host_of(header: str) -> str:
    """Returns the host of a Host header: without the port, and without the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _of_no_page(headers: Headers) -> bool:
    """Says whether a POST has no body and comes from no web page: browsers send Origin with each POST."""
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return empty and "content-type" not in headers and "origin" not in headers


def _is_probe(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and scope["path"] in _QUIET


class ProbesOnly:
    """Serves connections beyond the bound: probes are answered, all other requests refused, for the gateway is full."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_probe(scope):
            await self._app(scope, receive, send)
        else:
            error = Overloaded("This server has as many connections as it can hold.", retry_after_s=_FULL_RETRY_S)
            await error_response(error)(scope, receive, send)


_AT_ONCE = 4
"""Requests that begin in one turn of the loop; each takes some milliseconds until it is in the queue."""


class Turns:
    """Gives requests their turns. ``report`` is called with the number of waiting requests whenever it changes."""

    def __init__(self, report: Callable[[float], None], *, at_once: int = _AT_ONCE) -> None:
        self._report = report
        self._at_once = at_once
        self._left = at_once
        self._renewing = False
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant's first
        self._waiting = 0

    async def take(self, tenant: str) -> None:
        """Returns when a request of ``tenant`` may begin."""
        if self._left and not self._waiting:
            self._left -= 1
            self._renew()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        self._count(1)
        self._renew()
        await turn  # a cancelled one is skipped

    def _renew(self) -> None:
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._renewing, self._left = False, self._at_once
        while self._waiting and self._left:
            tenant, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            del self._queues[tenant]
            if queue:
                self._queues[tenant] = queue  # behind the others
            self._count(-1)
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            self._renew()

    def _count(self, change: int) -> None:
        self._waiting += change
        self._report(self._waiting)
