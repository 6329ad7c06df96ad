"""The OpenAPI document: bodies that the routes parse themselves, and every status that a client may get."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from services.gateway.responses import ErrorResponse
from services.gateway.schema import (
    NO_OPS,
    NOTHING,
    UNUSED,
    Body,
    CalledFunction,
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TextPart,
    TokenizeBody,
    ToolCall,
)

_REFERENCE = "#/components/schemas/{name}"
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait, 1 to 120.", "schema": {"type": "integer"}}}
_MEANINGS = {
    400: "The request is wrong; `error.param` names the field.",
    401: "An API key is missing or unknown.",
    403: "Without API keys, a request that names another host than this machine; or a key without the right.",
    404: "There is no such model or path.",
    405: "The path knows other methods.",
    408: "The head or the body took too long to come.",
    409: "The Idempotency-Key was used with another body.",
    413: "The body is too large.",
    415: "Without API keys, a body that is not called JSON.",
    429: "The queue is full, or the key's rate, concurrency or share of this gateway is reached.",
    431: "The head is too large.",
    500: "A fault of the server.",
    503: "The server cannot serve this now.",
}
_ANY = (403, 405, 408, 413, 431, 500, 503)
_BODIES: tuple[type[Body], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_IN_MESSAGES: tuple[type[Body], ...] = (ChatMessage, TextPart, ToolCall, CalledFunction)
Responses = dict[int | str, dict[str, Any]]


def refusals(*statuses: int) -> Responses:
    """Documents error answers; those of :data:`_ANY` may come from any path."""
    return {
        status: {"model": ErrorResponse, "description": _MEANINGS[status]}
        | ({"headers": _RETRY_AFTER} if status in (429, 503) else {})
        for status in sorted({*statuses, *_ANY})
    }


def post(body: type[Body], answer: type[BaseModel], *statuses: int, events: bool = False) -> dict[str, Any]:
    """Returns the arguments of a route that parses ``body`` itself and answers with ``answer``, or with ``events`` too.

    Readers of the document differ in whether a schema of events describes the whole stream or each event, so the schema
    names no type.
    """
    schema = {"$ref": _REFERENCE.format(name=body.__name__)}
    stream = {"content": {"text/event-stream": {"schema": {"description": "Chunks as server-sent events."}}}}
    return {
        "responses": {200: {"model": answer} | (stream if events else {}), **refusals(*statuses)},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def _without_effect() -> dict[str, Any]:
    """Returns schemas of the parameters that are taken for compatibility, with the values that change nothing."""
    unused = {name: msgspec.json.schema(kind | None) for name, kind in UNUSED.items()}
    neutral = {name: {"enum": [None, *values]} for name, values in NO_OPS.items()}
    note = {"description": "Accepted for compatibility; changes nothing."}
    return {name: schema | note for name, schema in sorted((unused | neutral).items())}


def document(app: FastAPI, *, protected: bool, model: str) -> dict[str, Any]:
    """Returns ``app``'s document; ``protected`` says that the API needs a key, ``model`` is the only model served."""
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, bodies = msgspec.json.schema_components(_BODIES, ref_template=_REFERENCE)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas.update({name: schema | {"additionalProperties": {"type": "null"}} for name, schema in bodies.items()})
    for body in _BODIES:
        properties = schemas[body.__name__]["properties"]
        properties["model"]["enum"] = [model, None]
        if issubclass(body, GenerationBody):
            properties |= _without_effect()
    for inside in _IN_MESSAGES:
        schemas[inside.__name__]["additionalProperties"] = {"enum": list(NOTHING)}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if protected:
        found["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    for operation in (operation for path in found["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's own; here it is a 400
        if protected and "401" in operation["responses"]:
            operation["security"] = [{"ApiKey": []}]
    return found
