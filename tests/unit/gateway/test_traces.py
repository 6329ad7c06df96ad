"""The gateway's spans: of requests and their attempts, with the context that goes on to schedulers and workers."""

from __future__ import annotations

import asyncio
from typing import Any

from testkit.http_peer import URL
from testkit.spans import Spans
from testkit.waiting import eventually

from services.runtime.tracing import TraceContext

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WORDS = "the quick brown fox"


def headers(flags: str = "01", **more: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{CLIENT}-{flags}", **more}


async def answered(gateway: Any, *, said: dict[str, str] | None = None, **body: Any) -> Any:
    gateway.says("hello", finish="stop")
    return await gateway.http.post(URL, json={"prompt": WORDS, "max_tokens": 9, **body}, headers=said or headers())


async def test_the_trace_of_the_client_goes_on_in_the_request(start):
    spans = Spans(share=0.0)
    gateway = await start(tracer=spans.tracer)
    answer = await answered(gateway, said=headers(**{"X-Request-Id": "mine", "tracestate": "vendor=1"}))
    await eventually(lambda: spans.named("POST /v1/completions"))
    request, attempt = spans.one("POST /v1/completions"), spans.one("attempt")
    assert answer.headers["traceparent"] == request.context.traceparent
    assert answer.headers["x-request-id"] == "mine"
    assert (request.parent.traceparent, request.context.state) == (headers()["traceparent"], "vendor=1")
    assert gateway.queue.admitted[0].traceparent == attempt.context.traceparent
    assert {span.name: span.parent for span in spans.all if span is not request} == dict.fromkeys(
        ["tokenize", "admission", "attempt"], request.context
    )
    assert request.attributes["expertmesh.request_id"] == "mine"
    assert request.attributes["gen_ai.operation.name"] == "text_completion"
    assert request.attributes["gen_ai.request.max_tokens"] == 9
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert request.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert [event.name for event in attempt.events] == ["first token"]
    written = [(span.name, span.attributes, span.events, span.error) for span in spans.all]
    assert not any(word in str(written) for word in WORDS.split()), "what clients write is nowhere"


async def test_a_malformed_context_begins_a_new_trace(start):
    spans = Spans()
    gateway = await start(tracer=spans.tracer)
    answer = await answered(gateway, said={"traceparent": "00-nonsense"})
    await eventually(lambda: spans.named("POST /v1/completions"))
    request = spans.one("POST /v1/completions")
    assert request.parent is None
    assert TraceContext.parse(answer.headers["traceparent"]) == request.context


async def test_a_request_that_is_not_sampled_has_no_span_and_says_so(start):
    spans = Spans()
    gateway = await start(tracer=spans.tracer)
    answer = await answered(gateway, said=headers("00"))
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert answer.headers["traceparent"].endswith("-00")
    assert spans.all == []
    assert gateway.queue.admitted[0].traceparent == ""
    get = await gateway.http.get("/v1/models", headers=headers())
    assert "traceparent" not in get.headers


async def test_without_a_tracer_nothing_is_answered_or_sent(gateway):
    answer = await answered(gateway)
    assert "traceparent" not in answer.headers
    assert gateway.queue.admitted[0].traceparent == ""


async def test_a_lost_attempt_ends_with_an_error_and_the_next_links_to_it(start, script):
    spans = Spans()
    gateway = await start(tracer=spans.tracer)
    asking = asyncio.create_task(gateway.http.post(URL, json={"prompt": "hello", "max_tokens": 9}, headers=headers()))
    (request,) = await gateway.queue.wait_for("admitted")
    ids = gateway.ids(WORDS)
    gateway.queue.emit(*script.events(request, ids[:2], finish=None), script.lost(request, 2))
    (again,) = await gateway.queue.wait_for("resubmitted")
    gateway.queue.emit(*script.events(again, ids[2:], start=2, finish="stop"))
    assert (await asking).status_code == 200
    await eventually(lambda: spans.named("POST /v1/completions"))
    lost, final = spans.named("attempt")
    assert (request.traceparent, again.traceparent) == (lost.context.traceparent, final.context.traceparent)
    assert (lost.error, final.error) == ("attempt lost: lease_expired", None)
    assert final.links == (lost.context,)
    assert (lost.attributes["expertmesh.delivered_tokens"], final.attributes["expertmesh.resumed_at"]) == (2, 2)
    assert final.attributes["expertmesh.attempt"] == 2


async def test_a_refused_request_ends_its_trace_with_the_error(start):
    spans = Spans()
    gateway = await start(tracer=spans.tracer)
    answer = await gateway.http.post(URL, json={"prompt": "x", "model": "other"}, headers=headers())
    assert answer.status_code == 404
    await eventually(lambda: spans.all)
    request = spans.one("POST /v1/completions")
    assert (request.error, request.attributes["http.response.status_code"]) == ("model_not_found", 404)


async def test_every_choice_has_an_attempt_of_its_own(start):
    spans = Spans()
    gateway = await start(tracer=spans.tracer)
    await answered(gateway, n=2)
    await eventually(lambda: spans.named("POST /v1/completions"))
    assert [span.attributes["expertmesh.choice"] for span in spans.named("attempt")] == [0, 1]
    contexts = {span.context.traceparent for span in spans.named("attempt")}
    assert contexts == {request.traceparent for request in gateway.queue.admitted}


async def test_histograms_remember_a_traced_request(start):
    spans = Spans(share=0.0)
    gateway = await start(tracer=spans.tracer)
    await answered(gateway)
    await answered(gateway, said={"x": "y"})
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        buckets = [
            sample
            for metric in gateway.registry.collect()
            for sample in metric.samples
            if sample.name == f"expertmesh_{name}_bucket"
        ]
        assert {sample.exemplar.labels["trace_id"] for sample in buckets if sample.exemplar} == {TRACE}
