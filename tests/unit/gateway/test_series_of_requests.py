"""Series that a gateway writes about requests: admission, delivery, objectives, exemplars; formats of its page."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from testkit.http_peer import URL, bearer
from testkit.queue.scripted import ScriptedQueue
from testkit.spans import Spans
from testkit.waiting import eventually

from services.errors import InternalError, InvalidRequest, QueueFull, QueueUnavailable
from services.gateway.exposition import Siblings, parse_upstreams
from services.messages import TokenEvent
from services.metrics import OPENMETRICS, TEXT
from services.runtime import MetricsServer, show_build

STREAM = {"prompt": "hello", "max_tokens": 200, "stream": True}
OPEN = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}


def objectives(gateway: Any) -> dict[tuple[str, str], float]:
    """The counts that are not 0."""
    found = {
        (objective, met): gateway.value("slo_requests_total", objective=objective, met=met)
        for objective in ("ttft", "tpot", "availability", "all")
        for met in ("true", "false")
    }
    return {labels: value for labels, value in found.items() if value}


async def test_an_answer_that_is_fast_enough_meets_every_objective(gateway):
    gateway.says("the fox")
    assert (await gateway.post()).status_code == 200
    assert objectives(gateway) == {(objective, "true"): 1 for objective in ("ttft", "tpot", "availability", "all")}


async def test_a_late_first_token_misses_one_objective_and_so_all(start):
    gateway = await start(ttft_s=1e-9)
    gateway.says([70])
    await gateway.post()
    assert objectives(gateway) == {("ttft", "false"): 1, ("availability", "true"): 1, ("all", "false"): 1}


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (InternalError("broken"), {("availability", "false"): 1, ("all", "false"): 1}),
        (InvalidRequest("wrong"), {}),
    ],
    ids=["a fault of the server", "a fault of the client"],
)
async def test_an_error_counts_where_the_server_is_at_fault(gateway, error, counted):
    asking, request = await gateway.ask()
    gateway.queue.emit(TokenEvent(request_id=request.id, attempt=1, index=0, finish="error", error=error.info()))
    await asking
    assert objectives(gateway) == counted


async def test_a_cancelled_request_does_not_count(gateway):
    peer = await gateway.connect()
    await peer.send(post_of(STREAM))
    await gateway.queue.wait_for("admitted")
    peer.writer.transport.abort()
    await eventually(lambda: gateway.value("requests_total", finish="cancelled") == 1)
    assert objectives(gateway) == {}


def post_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (QueueUnavailable("away", retry_after_s=1), {("availability", "false"): 1, ("all", "false"): 1}),
        (QueueFull("full", retry_after_s=1), {}),
    ],
)
async def test_a_refusal_before_the_queue_counts_where_it_is_the_server_s_fault(gateway, monkeypatch, error, counted):
    async def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(gateway.queue, "admit", refuse)
    answer = await gateway.post()
    assert answer.status_code == error.status
    await eventually(lambda: gateway.value("http_requests_total", route=URL, status=str(error.status)) == 1)
    assert objectives(gateway) == counted


async def test_the_time_until_a_request_is_queued_is_measured_once_for_each(gateway, monkeypatch):
    admit = gateway.queue.admit

    async def slowly(*given: Any, **named: Any) -> Any:
        await asyncio.sleep(0.05)
        return await admit(*given, **named)

    monkeypatch.setattr(gateway.queue, "admit", slowly)
    gateway.says("the fox")
    await asyncio.gather(gateway.post(), gateway.post())
    assert gateway.value("request_admission_seconds_count") == 2
    assert gateway.value("request_admission_seconds_sum") >= 0.1


async def test_delivery_is_measured_from_the_publication_to_the_write(start):
    queue = ScriptedQueue()
    gateway = await start(queue=queue, redis_ms=lambda: len(queue.events) + 3000.0)
    gateway.says("the fox")
    answer = await gateway.http.post(URL, json=STREAM)
    assert "[DONE]" in answer.text
    count, total = (gateway.value(f"token_delivery_seconds_{part}") for part in ("count", "sum"))
    assert count >= 1
    assert 3.0 * count <= total < 3.5 * count, "published three seconds ago by Redis's clock"


async def test_what_no_client_streams_has_no_delivery(start):
    gateway = await start(redis_ms=lambda: 5000.0)
    gateway.says("the fox")
    await gateway.post()
    assert gateway.value("token_delivery_seconds_count") == 0


async def test_the_page_is_in_openmetrics_where_that_is_accepted_with_exemplars_of_traced_requests(start):
    gateway, trace = await start(tracer=Spans(share=0.0).tracer), "0af7651916cd43dd8448eb211c80319c"
    gateway.says("the fox")
    await gateway.http.post(URL, json={"prompt": "hello"}, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    answer = await gateway.http.get("/metrics", headers=OPEN)
    assert answer.headers["content-type"] == OPENMETRICS.content_type
    assert answer.text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        exemplars = [one.exemplar for one in families[f"expertmesh_{name}"].samples if one.exemplar]
        assert [one.labels for one in exemplars] == [{"trace_id": trace}], name
    assert 'expertmesh_requests_total{finish="length"} 1.0' in answer.text, "counters keep their names"
    plain = await gateway.http.get("/metrics")
    assert plain.headers["content-type"] == TEXT.content_type
    assert "trace_id" not in plain.text
    assert "# EOF" not in plain.text


async def test_a_merged_page_has_one_end_and_every_process(gateway):
    registries = [CollectorRegistry(), CollectorRegistry()]
    servers = [MetricsServer(registry) for registry in registries]
    ports = [await server.start() for server in servers]
    for registry in registries:
        show_build(registry, "attention")
    urls = [f"attention=http://127.0.0.1:{port}" for port in ports]
    siblings = Siblings(parse_upstreams(urls))
    show_build(gateway.registry, "gateway")
    page = await siblings.page(OPENMETRICS.encode(gateway.registry).decode(), OPENMETRICS)
    for server in servers:
        await server.close()
    await siblings.close()
    assert page.count("# EOF") == 1
    families = {family.name: family for family in text_string_to_metric_families(page)}
    roles = [(one.labels["role"], one.labels.get("instance")) for one in families["expertmesh_build_info"].samples]
    assert sorted(roles, key=str) == [
        ("attention", "attention-0"),
        ("attention", "attention-1"),
        ("gateway", None),
    ]
    assert [one.value for one in families["expertmesh_metrics_upstream_up"].samples] == [1, 1]


async def test_a_sibling_that_answers_in_another_format_is_shown_as_down():
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b"# TYPE rows gauge\nrows 5\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    siblings = Siblings(parse_upstreams([f"old=http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]))
    pages = [await siblings.page(form.end, form) for form in (TEXT, OPENMETRICS)]
    await siblings.close()
    server.close()
    assert ['expertmesh_metrics_upstream_up{role="old"} 1' in page for page in pages] == [True, False]
    assert ["rows" in page for page in pages] == [True, False]


async def test_a_tenant_s_name_is_on_no_page(start):
    gateway = await start(tenants=("alice",))
    gateway.says("the fox")
    await gateway.http.post(URL, json={"prompt": "hello"}, headers=bearer("alice"))
    assert "alice" not in (await gateway.http.get("/metrics")).text
