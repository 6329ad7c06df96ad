"""What the gateway adds to a request's trace. In: a request, and what becomes of its sequences. Out: spans.

    POST /v1/completions              the request, as HTTP and GenAI conventions of OpenTelemetry describe it
      tokenize, admission
      attempt                         services/gateway/sequence_trace.py
        queue, assign, prefill ...    of scheduler and workers, who get the attempt's context with the request

Names beginning with gen_ai are of conventions in development.
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access import Note, note_of
from services.runtime.tracing import Span, TraceContext, Tracer, Value, working_under

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_PROVIDER = "expertmesh"
_CLIENT_LEFT = 499
"""What log lines call the status of an answer that nobody waited for."""


class TracedRequests:
    """Middleware that traces sampled POSTs, inside the one that gives a request its note. The answer to a POST carries
    the context of its span as ``traceparent``, whose flag says whether it is sampled."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = TraceContext.parse(headers.get("traceparent", ""), headers.get("tracestate", ""))
        context, status = self._tracer.request(given), _CLIENT_LEFT

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["traceparent"] = context.traceparent
            await send(message)

        if not context.sampled:
            await self._app(scope, receive, send_marked)
            return
        note = note_of(scope)
        note.trace_id = context.trace_hex
        about = {"expertmesh.request_id": note.ids.request_id}
        with self._tracer.served("POST", context, given, about) as span, working_under(span):
            try:
                await self._app(scope, receive, send_marked)
            finally:
                _describe(span, scope, note, status)


def _describe(span: Span, scope: Scope, note: Note, status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    span.name = f"POST {route}" if route else "POST"
    facts: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version"),
        "expertmesh.tenant": note.tenant,
        **_of_generation(note, route),
    }
    span.attributes.update({name: value for name, value in facts.items() if value is not None})
    error = note.error or (note.job.error if note.job else None)
    if error is not None or status >= 500:
        span.fail(error.code if error else str(status))


def _of_generation(note: Note, route: str | None) -> dict[str, Value | None]:
    if (job := note.job) is None or route not in _OPERATIONS:
        return {}
    finishes = sorted({choice.finish for choice in job.choices if choice.finish})
    return {
        "gen_ai.operation.name": _OPERATIONS[route],
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": note.model,
        "gen_ai.response.model": note.model,
        "gen_ai.response.id": note.completion,
        "gen_ai.request.max_tokens": job.choices[0].request.sampling.max_tokens,
        "gen_ai.request.choice.count": job.n,
        "gen_ai.usage.input_tokens": sum(len(choice.prompt) for choice in job.choices[:: job.n]),
        "gen_ai.usage.output_tokens": sum(len(choice.generated) for choice in job.choices),
        "gen_ai.usage.cache_read.input_tokens": max(choice.cached_tokens for choice in job.choices),
        "gen_ai.response.finish_reasons": finishes or None,
    }
