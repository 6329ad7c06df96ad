"""Errors as HTTP answers in OpenAI's shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.config import nearest_hint
from services.errors import (
    MAX_RETRY_AFTER_S,
    BodyTooLarge,
    Draining,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    QueueUnavailable,
    RequestError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from services.gateway.access import note_error
from services.gateway.not_supported import not_offered
from services.gateway.openai_format import error_body
from services.gateway.refusals import Refusals

log = logging.getLogger(__name__)

_DEFAULT_RETRY_S = 1.0
_LONGEST_GUESSED = 40  # characters of an unknown path that are compared with known ones
_KEEPS_OUT = (Unauthorized, BodyTooLarge, TooManyRequests, Overloaded, QueueUnavailable, Draining)
"""Errors that keep a valid request out; neither answers to probes nor ends of requests that had begun."""

Handler = Callable[[Request, Exception], Awaitable[Response]]


def retry_headers(error: RequestError) -> dict[str, str]:
    """Returns headers that say when to retry: in at most 120 seconds, or not at all where no retry can help."""
    headers = {}
    if isinstance(error, TooManyRequests | Unavailable):
        wait_s = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S))
        if not error.retryable:
            headers["x-should-retry"] = "false"
    return headers


class _ErrorResponse(Response):
    """An answer that says which error it is to the request's log line."""

    def __init__(self, error: RequestError, headers: dict[str, str]) -> None:
        body = msgspec.json.encode(error_body(error))
        super().__init__(body, status_code=error.status, headers=headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with the status, body and headers of ``error``."""
    return _ErrorResponse(error, retry_headers(error) | (headers or {}))


def on_request_error(refusals: Refusals) -> Handler:
    """Returns a handler that answers with the error; ``refusals`` counts errors that keep clients out."""

    async def answer(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        if isinstance(error, _KEEPS_OUT):
            refusals.note(error.code, f"refused a request: {error.message}")
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
        return error_response(error, headers)

    return answer


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answers Starlette's own refusals: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        refusal: RequestError = MethodNotAllowed(f"{request.method} is not allowed here.", hint="See /openapi.json.")
    elif error.status_code == 404:
        known = not_offered(request.url.path)
        refusal = known or NotFound("There is nothing at this path.", hint=_nearest(request) or "See /openapi.json.")
    else:
        refusal = InvalidRequest(str(error.detail))
    return error_response(refusal, dict(error.headers or {}))


def _nearest(request: Request) -> str | None:
    paths = (route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path)
    return nearest_hint(request.url.path[:_LONGEST_GUESSED], paths)


async def on_validation_error(_request: Request, error: Exception) -> Response:
    """Answers a header or path parameter of the wrong form."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(InvalidRequest(f"{param}: {first['msg']}.", param=param))


async def on_crash(_request: Request, _error: Exception) -> Response:
    """Answers a bug. The outermost middleware logs the traceback; the client sees nothing of it."""
    return error_response(InternalError("The server failed.", hint="Its log has the details, by X-Request-Id."))
