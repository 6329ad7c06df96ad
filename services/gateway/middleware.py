"""What every HTTP request passes, as plain ASGI: its id, its log line and count, and who may ask at all."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.errors import Forbidden, InternalError, Overloaded, RequestError, WrongContentType
from services.gateway.auth import is_loopback
from services.gateway.errors_http import error_response
from services.gateway.turns import Turns
from services.metrics import GatewayMetrics
from services.runtime import bind_request_id

log = logging.getLogger(__name__)

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
_MAX_ID = 128
_LOGGED_PATH = 512  # characters; a path may have 64 Ki of them
_QUIET = ("/health", "/ready", "/accepting", "/metrics")
_UNTIL_ANSWERED = "expertmesh.until_answered"
_FULL_RETRY_S = 2.0


def request_id(headers: Headers) -> str:
    """The client's ``X-Request-Id`` without what could break a log or a header; a new one where nothing is left."""
    given = _UNSAFE.sub("", headers.get("x-request-id", ""))[:_MAX_ID]
    return given or uuid.uuid4().hex


def until_answered(scope: Scope) -> ExitStack:
    """What is entered here is left when the request is answered, or its client has gone."""
    stack: ExitStack = scope[_UNTIL_ANSWERED]
    return stack


class RequestContext:
    """Outermost: gives the request its id, counts and logs it, and answers 500 where the application crashes. While
    ``leaving`` each answer ends its connection, so that the client's next one finds another gateway. So does one to a
    client that waits for a 100 before it sends its body: nobody knows whether it will."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, leaving: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._metrics = metrics
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity, status, began = request_id(headers), 0, time.monotonic()
        hesitant = headers.get("expect", "").lower() == "100-continue"

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = identity
                if self._leaving() or (hesitant and status >= 400):
                    answered["connection"] = "close"
            await send(message)

        with bind_request_id(identity), ExitStack() as scope[_UNTIL_ANSWERED]:
            try:
                await self._app(scope, receive, send_marked)
            except ClientDisconnect:
                log.info("client went away before its request was complete")
            except Exception:
                log.exception("request failed")
                if not status:
                    answer = error_response(InternalError("The server failed.", hint="Its log has the details."))
                    await answer(scope, receive, send_marked)
            finally:
                self._record(scope, status, time.monotonic() - began)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.http_requests.labels(route, str(status or 499)).inc()
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        if log.isEnabledFor(level):
            extra = {"method": scope["method"], "path": scope["path"][:_LOGGED_PATH], "status": status or 499}
            log.log(level, "request", extra=extra | {"ms": round(seconds * 1e3, 1)})


class ByTurns:
    """Lets requests begin at a pace, tenants in rotation; who asks how the server is does not wait. ``tenant_of`` tells
    from the ``Authorization`` header whose turn it is."""

    def __init__(self, app: ASGIApp, turns: Turns, tenant_of: Callable[[str | None], str]) -> None:
        self._app = app
        self._turns = turns
        self._tenant_of = tenant_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_probe(scope):
            await self._turns.take(self._tenant_of(Headers(scope=scope).get("authorization")))
        await self._app(scope, receive, send)


class SameMachine:
    """For a gateway without keys that only this machine reaches: asks for what no web page that is open here can send.

    A page's own requests name the page's host, also where its DNS name has been turned to loopback, and the browser
    lets it send JSON to another host only if that host has agreed.
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
                "Without API keys this server answers to localhost and loopback addresses alone.",
                hint="Use http://127.0.0.1, or start it with --auth required.",
            )
        if scope["method"] == "POST" and _media_type(headers) != "application/json":
            return WrongContentType("A body has to be JSON.", hint="Send the header 'Content-Type: application/json'.")
        return None


def _host_of(header: str) -> str:
    """The host of a Host header: without the port, and without the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_probe(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and scope["path"] in _QUIET


class ProbesOnly:
    """For connections beyond the bound: says how the gateway is, and that it is full."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_probe(scope):
            await self._app(scope, receive, send)
        else:
            error = Overloaded("This server has as many connections as it can hold.", retry_after_s=_FULL_RETRY_S)
            await error_response(error)(scope, receive, send)
