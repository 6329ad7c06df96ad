"""Traces in files: a line of OTLP JSON for each batch, a file for each process. Bounded in bytes.

The format is that of OpenTelemetry's collector for files (ExportTraceServiceRequest, ids in hexadecimal digits), so
that other programs read it, too. A process that starts again goes on with its file.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from services.errors import ConfigError

SUFFIX = ".jsonl"
MAX_BYTES = 64 << 20
"""Size at which a file becomes that process's former one, which the next then replaces."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")

log = logging.getLogger(__name__)


class FolderExporter(SpanExporter):
    """Appends spans to a file of ``folder`` named after ``process``; one that somebody removes is made again.

    Spans that cannot be written are dropped, which is logged once.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, process: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._file, self._max_bytes = folder / f"{_UNSAFE.sub('-', process)}{SUFFIX}", max_bytes
        self._failing = False
        try:
            self._write(b"\n")  # the process before may have been killed within a line
        except OSError as error:
            raise ConfigError(
                f"Traces cannot be written to {folder}: {error.strerror}.", hint="Choose another --trace-folder."
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = json.dumps(request_of(spans), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.exists() and self._file.stat().st_size + len(line) > self._max_bytes:
                self._file.replace(self._file.with_suffix(f".former{SUFFIX}"))
            self._write(line)
        except OSError as error:
            if not self._failing:
                log.warning("traces cannot be written to %s (%s); they are dropped", self._file, error.strerror)
            self._failing = True
            return SpanExportResult.FAILURE
        self._failing = False
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: each batch is written at once."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        del timeout_millis
        return True

    def _write(self, line: bytes) -> None:
        """Append ``line`` in one call, so that two processes with one name do not mix theirs."""
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def request_of(spans: Iterable[ReadableSpan]) -> dict[str, Any]:
    """Return ``spans``, which have one resource and one scope, as an ExportTraceServiceRequest in OTLP's JSON."""
    spans = list(spans)
    resource: Resource = spans[0].resource
    scope: InstrumentationScope | None = spans[0].instrumentation_scope
    named = {"name": scope.name, "version": scope.version} if scope else {}
    of_scope = {"scope": named, "spans": [_span(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _pairs(resource.attributes)}, "scopeSpans": [of_scope]}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.context, span.parent
    assert context is not None
    found: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": f"{parent.span_id:016x}" if parent else "",
        "traceState": context.trace_state.to_header(),
        "name": span.name,
        "kind": span.kind.value + 1,  # the SDK counts from INTERNAL, OTLP has UNSPECIFIED before it
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _pairs(span.attributes or {}),
        "events": [
            {"name": event.name, "timeUnixNano": str(event.timestamp), "attributes": _pairs(event.attributes or {})}
            for event in span.events
        ],
        "links": [
            {"traceId": f"{link.context.trace_id:032x}", "spanId": f"{link.context.span_id:016x}"}
            for link in span.links
        ],
    }
    status = {"code": span.status.status_code.value, "message": span.status.description or ""}
    found |= {"status": status if status["code"] else {}}
    return {name: value for name, value in found.items() if value not in ("", [], {})}


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            assert isinstance(value, Sequence)
            return {"arrayValue": {"values": [_value(each) for each in value]}}
