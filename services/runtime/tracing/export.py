"""Sends ended spans away, on threads of OpenTelemetry's SDK: to a collector by OTLP over HTTP, and into files.

This is the one module that imports OpenTelemetry. Spans become the SDK's when they end, and wait in its bounded queues;
what does not fit is dropped, and the SDK says so.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE, OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from services.config import Role, Settings
from services.runtime.address import incarnation
from services.runtime.tracing.context import TraceContext
from services.runtime.tracing.folder import FolderExporter
from services.runtime.tracing.spans import Span

CLOSE_S = 5.0
"""How long the last spans of a process may take to be sent."""
_FOLDER_DELAY_MS = 500.0
"""How long spans wait before they are written: those of a process that is killed then get lost."""
_FOLDER_QUEUE = 16_384
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FINE = Status(StatusCode.UNSET)

log = logging.getLogger(__name__)


class Exports:
    """The places where spans go. Those of engine steps go to ``of_steps`` only.

    Args:
        everywhere: processors of spans of requests.
        of_steps: processors of spans of engine steps.
    """

    def __init__(
        self, resource: Resource, everywhere: Sequence[BatchSpanProcessor], of_steps: Sequence[BatchSpanProcessor]
    ) -> None:
        self._resource, self._everywhere, self._of_steps = resource, everywhere, of_steps
        self._scope = InstrumentationScope("expertmesh", version("expertmesh"))

    @classmethod
    def of(cls, settings: Settings, role: Role) -> Exports:
        """Return those that ``settings`` ask for. Raises ConfigError where the folder cannot be written."""
        folders, collectors = [], []
        if settings.trace_folder is not None:
            exporter = FolderExporter(settings.trace_folder, settings.process or f"{role}-{os.getpid()}")
            folders = [_in_batches(exporter, delay_ms=_FOLDER_DELAY_MS, queue=_FOLDER_QUEUE)]
        if settings.otlp_endpoint is not None or settings.trace_folder is None:
            collectors = [_in_batches(Watched(OTLPSpanExporter(endpoint=_traces_at(settings.otlp_endpoint))))]
        both = [*folders, *collectors]
        return cls(_resource(settings, role), both, both if settings.trace_steps == "on" else folders)

    @property
    def takes_steps(self) -> bool:
        return bool(self._of_steps)

    def put(self, span: Span) -> None:
        ended = self._ended(span)
        for processor in self._of_steps if span.steps else self._everywhere:
            processor.on_end(ended)

    def close(self) -> None:
        """Send what is left, for ``CLOSE_S`` at most: a collector that does not answer must not keep the process."""
        closing = [threading.Thread(target=_shut, args=(each,), daemon=True) for each in self._everywhere]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(CLOSE_S)

    def _ended(self, span: Span) -> ReadableSpan:
        """Return ``span`` as the SDK's. It is made here and not by the SDK's tracer, which takes a lock and several
        times as long, on the thread of an engine."""
        return ReadableSpan(
            span.name,
            context=_sdk(span.context),
            parent=None if span.parent is None else _sdk(span.parent, remote=True),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, attributes, at_ns) for name, at_ns, attributes in span.events],
            links=[Link(_sdk(context)) for context in span.links],
            kind=_KINDS[span.kind],
            status=_FINE if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


class Watched(SpanExporter):
    """Passes spans on to ``exporter``, and logs once that they do not arrive, and once that they do again."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._failing = False
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # lines for each batch and each attempt

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("the collector takes no traces; they are dropped until it does")
        elif self._failing and not failed:
            log.info("the collector takes traces again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _in_batches(
    exporter: SpanExporter, *, delay_ms: float | None = None, queue: int | None = None
) -> BatchSpanProcessor:
    """Return a processor. OpenTelemetry's variables come before ``delay_ms`` and ``queue``."""
    return BatchSpanProcessor(
        exporter,
        schedule_delay_millis=None if OTEL_BSP_SCHEDULE_DELAY in os.environ else delay_ms,
        max_queue_size=None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else queue,
    )


def _shut(processor: BatchSpanProcessor) -> None:
    processor.shutdown()  # type: ignore[no-untyped-call]


def _traces_at(endpoint: str | None) -> str | None:
    """Return the address for traces of the collector at ``endpoint``; None leaves it to OpenTelemetry's variables."""
    if endpoint is None or endpoint.rstrip("/").endswith("/v1/traces"):
        return endpoint
    return f"{endpoint.rstrip('/')}/v1/traces"


def _resource(settings: Settings, role: Role) -> Resource:
    """Return what all spans of this process say of it. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count first."""
    own = Resource(
        {
            "service.name": f"expertmesh-{role}",
            "service.namespace": settings.namespace,
            "service.instance.id": incarnation(),
            "service.version": version("expertmesh"),
            "process.pid": os.getpid(),
            "expertmesh.process": settings.process or role,
            "expertmesh.trace_sample": settings.traced_share,
        }
    )
    return Resource.create({}).merge(own).merge(OTELResourceDetector().detect())


def _sdk(context: TraceContext, *, remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SpanContext(context.trace_id, context.span_id, remote, _SAMPLED, state)
