"""Log lines: text on a terminal, one JSON object per line elsewhere. Each carries the role; lines about a request carry
its id, its tenant and, where it is traced, the id of its trace, and never what it asks or the answer."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TextIO


@dataclass(slots=True)
class _Request:
    """The request that a task serves; its tenant is known once its key is."""

    id: str
    tenant: str | None = None


_request: ContextVar[_Request | None] = ContextVar("request", default=None)
_trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "role", "request_id", "trace_id", "taskName"),
    "color_message",  # uvicorn repeats its message in colours
}
_CONTEXT = ("request_id", "trace_id")
_PLAIN = re.compile(r"[^\s=\"]+")
_CHATTY = ("asyncio", "httpcore", "httpcore2", "httpx", "httpx2", "urllib3")


def printable(text: str) -> str:
    """Return ``text`` in one line, with characters that steer a terminal or turn the writing direction escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@contextmanager
def bind_request_id(request_id: str) -> Iterator[None]:
    """Let lines logged inside, in this task and those it starts, carry ``request_id``."""
    token = _request.set(_Request(request_id))
    try:
        yield
    finally:
        _request.reset(token)


def bind_tenant(tenant: str) -> None:
    """Let lines logged inside :func:`bind_request_id`, in any of its tasks, carry ``tenant`` from now on."""
    if (request := _request.get()) is not None:
        request.tenant = tenant


@contextmanager
def bind_trace_id(trace_id: str) -> Iterator[None]:
    """Let lines logged inside, in this task and those it starts, carry ``trace_id``."""
    token = _trace_id.set(trace_id)
    try:
        yield
    finally:
        _trace_id.reset(token)


def configure_logging(
    role: str,
    level: str = "info",
    style: Literal["auto", "text", "json"] = "auto",
    stream: TextIO | None = None,
) -> None:
    """Make the root logger write to ``stream`` (stderr); whatever was configured before is replaced."""
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    as_text = style == "text" or (style == "auto" and target.isatty())
    handler.setFormatter(_TextFormatter() if as_text else _JsonFormatter())
    handler.addFilter(_context_of(role))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _context_of(role: str) -> logging.Filter:
    class Context(logging.Filter):
        """Adds the fields that the formatters print around the message."""

        def filter(self, record: logging.LogRecord) -> bool:
            record.role = role
            request = _request.get()
            own = getattr(record, "request_id", None)
            record.request_id = own or (request and request.id)
            if request is not None and request.tenant and own in (None, request.id):
                record.tenant = getattr(record, "tenant", None) or request.tenant
            record.trace_id = getattr(record, "trace_id", None) or _trace_id.get()
            return True

    return Context()


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields that the caller passed as ``extra``. Names that begin with an underscore are libraries': Ray
    gives each record one."""
    found = ((key, value) for key, value in vars(record).items() if not key.startswith("_"))
    return {key: value for key, value in found if key not in _OWN_ATTRIBUTES}


def _quoted(value: object) -> str:
    """Return ``value`` as text lines show it: in quotes where it could be taken for several fields."""
    text = str(value)
    if isinstance(value, str) and not _PLAIN.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def _in_json(char: str) -> str:
    """Return ``char`` of a JSON text, as an escape if it would steer a terminal or end a line for some readers."""
    return char if char.isprintable() else json.dumps(char)[1:-1]


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(role)s  %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: getattr(record, name, None) for name in _CONTEXT} | _extras(record)
        tail = "".join(f"  {key}={_quoted(value)}" for key, value in fields.items() if value is not None)
        head, *trace = super().format(record).split("\n")
        return "\n".join([head + printable(tail), *map(printable, trace)])

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": getattr(record, "role", None),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in _CONTEXT if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line | _extras(record), default=str, ensure_ascii=False)
        return text if text.isprintable() else "".join(map(_in_json, text))
