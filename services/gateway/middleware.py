"""What every HTTP request passes, as plain ASGI: its id, its log line and count, and the bound on its body."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.errors import BodyTooLarge, InternalError
from services.gateway.errors_http import error_response
from services.metrics import GatewayMetrics
from services.runtime import bind_request_id

log = logging.getLogger(__name__)

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
_MAX_ID = 128
_QUIET = ("/health", "/ready", "/accepting", "/metrics")
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_S = 10.0


def request_id(headers: Headers) -> str:
    """The client's ``X-Request-Id`` without what could break a log or a header; a new one where nothing is left."""
    given = _UNSAFE.sub("", headers.get("x-request-id", ""))[:_MAX_ID]
    return given or uuid.uuid4().hex


class RequestContext:
    """Outermost: gives the request its id, counts and logs it, and answers 500 where the application crashes. While
    ``leaving`` each answer ends its connection, so that the client's next one finds another gateway."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, leaving: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._metrics = metrics
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity, status, began = request_id(Headers(scope=scope)), 0, time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = identity
                if self._leaving():
                    headers["connection"] = "close"
            await send(message)

        with bind_request_id(identity):
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
            extra = {"method": scope["method"], "path": scope["path"], "status": status or 499}
            log.log(level, "request", extra=extra | {"ms": round(seconds * 1e3, 1)})


class BodyLimit:
    """Refuses bodies over ``limit`` bytes: by Content-Length before reading, else as soon as they exceed it.

    What was refused is read and thrown away, up to a bound, because most clients read no answer before they have sent
    everything.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            if headers.get("expect", "").lower() != "100-continue":  # such a client reads the answer before it sends
                await self._discard(receive)
            await error_response(self._refusal(), {"connection": "close"})(scope, receive, send)
            return
        read = 0

        async def receive_bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                await self._discard(receive)
                raise self._refusal()
            return message

        await self._app(scope, receive_bounded, send)

    def _refusal(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body exceeds {self._limit} bytes.", hint="Send less, or raise --max-body-bytes.")

    async def _discard(self, receive: Receive) -> None:
        discarded = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while discarded < _DISCARD_BYTES:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
