"""A collector of traces: OTLP over HTTP, read with OpenTelemetry's own protobufs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from testkit.waiting import until


@dataclass(frozen=True, kw_only=True)
class Got:
    """A span as it came. Ids are hexadecimal digits."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    process: str
    service: str
    start_ns: int
    end_ns: int
    error: str | None
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[str, ...]


@dataclass
class Collector:
    """What came, by a server on ``url``. ``status`` is its answer to each batch."""

    url: str
    status: int = 200
    spans: list[Got] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def of(self, trace_id: str) -> list[Got]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def named(self, trace_id: str, name: str) -> list[Got]:
        return [span for span in self.of(trace_id) if span.name == name]

    def wait_for(self, trace_id: str, *names: str) -> list[Got]:
        """The spans of the trace once it has one with each of ``names``."""
        until(lambda: set(names) <= {span.name for span in self.of(trace_id)}, f"{names} have come", limit_s=30)
        return self.of(trace_id)

    def take(self, body: bytes) -> None:
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(part.resource.attributes)
            self.resources.append(resource)
            self.spans += [_got(span, resource) for scope in part.scope_spans for span in scope.spans]


def _got(span: Any, resource: dict[str, Any]) -> Got:
    return Got(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        process=resource["expertmesh.process"],
        service=resource["service.name"],
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if self.path == "/v1/traces" and collector.status == 200:
                collector.take(body)
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """The batches are seen in the tests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
