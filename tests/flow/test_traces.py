"""A client's trace goes on through all roles, to a collector and into files, also while workers are killed with -9."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest
from testkit.collector import Collector, Got, collecting
from testkit.pocket.answers import serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

from services.cli.main import main
from services.runtime.address import incarnations_of

TOKENS = 120
SECRET_WORDS = "define: violinist\n"

pytestmark = pytest.mark.alone


@dataclass(kw_only=True)
class Traced:
    """A server whose experts are behind tcp, and the collector of its traces."""

    server: Server
    collector: Collector

    def ask(self, *, disturb: Callable[[str], None] = lambda _: None, sampled: bool = True) -> tuple[str, str, str]:
        """The ids of the client's trace and span, and the text of a streamed answer in whose midst ``disturb`` gets the
        trace's id."""
        trace, span = secrets.token_hex(16), secrets.token_hex(8)
        body = {"model": "pocket", "prompt": SECRET_WORDS, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        headers = {"traceparent": f"00-{trace}-{span}-{'01' if sampled else '00'}", "X-Request-Id": f"r-{trace}"}
        url, text, chunks = f"{self.server.url}/v1/completions", "", 0
        body |= {"ignore_eos": True}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            assert answer.status_code == 200
            assert answer.headers["traceparent"].split("-")[1] == trace
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text, chunks = text + json.loads(line.removeprefix("data: "))["choices"][0]["text"], chunks + 1
                    if chunks == 5:
                        disturb(trace)
        return trace, span, text


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch, collecting() as collector, bench(folder) as stage:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=mesh")
        server = serve_pocket(
            stage,
            layout="disaggregated",
            workers=2,
            expert_workers=3,
            expert_groups=1,
            fabric_shared="off",
            trace_sample=0,
            trace_client_rate=100,
            otlp_endpoint=collector.url,
            trace_folder=folder / "traces",
            log_format="json",
        )
        traced = Traced(server=server, collector=collector)
        whole(traced)
        yield traced


def whole(traced: Traced) -> None:
    until(lambda: traced.server.metric("expertmesh_expert_seats") == 3, "all seats are listed")
    until(lambda: traced.server.metric("expertmesh_workers") == 2, "both attention workers are there")


def one(spans: list[Got], name: str) -> Got:
    (found,) = [span for span in spans if span.name == name]
    return found


def processes(spans: list[Got], name: str) -> set[str]:
    return {span.process.partition("-")[0] for span in spans if span.name == name}


def test_a_request_is_one_trace_over_all_roles(traced: Traced, capsys: pytest.CaptureFixture[str]) -> None:
    trace, client, _ = traced.ask()
    spans = traced.collector.wait_for(trace, "POST /v1/completions", "decode", "experts", "queue", "attempt")
    assert {span.service.removeprefix("expertmesh-") for span in spans} == {
        "gateway",
        "scheduler",
        "attention",
        "experts",
    }
    by_id = {span.span_id: span for span in spans}
    request, attempt = one(spans, "POST /v1/completions"), one(spans, "attempt")
    assert request.parent_id == client
    assert {by_id[span.parent_id].name for span in spans if span.name in ("tokenize", "admission", "attempt")} == {
        request.name
    }
    of_attempt = {span.name for span in spans if span.parent_id == attempt.span_id}
    assert of_attempt == {"queue", "assign", "batch wait", "prefill", "decode", "exchange"}
    assert {by_id[span.parent_id].name for span in spans if span.name == "experts"} == {"exchange"}
    assert processes(spans, "queue") == {"scheduler"}
    assert processes(spans, "decode") == {"attention"}
    facts = request.attributes
    assert (facts["gen_ai.request.model"], facts["gen_ai.request.max_tokens"]) == ("pocket", TOKENS)
    assert (facts["gen_ai.usage.output_tokens"], facts["gen_ai.response.finish_reasons"]) == (TOKENS, ["length"])
    assert (facts["http.response.status_code"], facts["expertmesh.request_id"]) == (200, f"r-{trace}")
    assert all("violinist" not in str(span) for span in spans), "what clients write is nowhere"
    assert {resource["deployment.environment.name"] for resource in traced.collector.resources} == {"test"}
    assert {headers["x-tenant"] for headers in traced.collector.headers} == {"mesh"}
    (line,) = [line for line in traced.server.proc.log().splitlines() if f"r-{trace}" in line and '"request"' in line]
    assert json.loads(line)["trace_id"] == trace

    assert main(["trace", f"r-{trace}", "--url", traced.server.url]) == 0
    drawn = capsys.readouterr().out
    assert all(word in drawn for word in ("POST /v1/completions", "prefill", "exchange x", "experts", trace))


def test_a_request_that_its_client_does_not_sample_leaves_nothing(traced: Traced) -> None:
    unseen, *_ = traced.ask(sampled=False)
    seen, *_ = traced.ask()
    traced.collector.wait_for(seen, "POST /v1/completions", "experts")
    assert traced.collector.of(unseen) == []
    assert main(["trace", f"r-{unseen}", "--url", traced.server.url]) == 1


def test_an_attention_worker_that_is_killed_leaves_one_trace_with_both_attempts(traced: Traced) -> None:
    *_, text = traced.ask()
    trace, _, again = traced.ask(disturb=lambda trace: worker_of(traced, trace).kill())
    assert again == text, "the answer is whole"
    spans = traced.collector.wait_for(trace, "POST /v1/completions", "decode")
    lost, final = [span for span in spans if span.name == "attempt"]
    assert (lost.error is None, final.error) == (False, None)
    assert (lost.attributes["expertmesh.attempt"], final.attributes["expertmesh.attempt"]) == (1, 2)
    assert final.links == (lost.span_id,)
    assert 0 < lost.attributes["expertmesh.delivered_tokens"] == final.attributes["expertmesh.resumed_at"]
    assert one(spans, "POST /v1/completions").error is None
    known = {span.span_id for span in spans}
    lonely = [span.name for span in spans if span.parent_id not in known and span.name not in ("POST /v1/completions",)]
    assert set(lonely) <= {"experts"}, "only exchanges of the last moments went with their process"
    assert len({span.process for span in spans if span.name == "queue"} | {"scheduler"}) == 1
    whole(traced)


def test_an_expert_worker_that_is_killed_costs_the_trace_nothing(traced: Traced) -> None:
    *_, text = traced.ask()
    killed: list[str] = []

    def kill(trace: str) -> None:
        until(lambda: traced.collector.named(trace, "experts"), "an expert worker has shown itself")
        name = traced.collector.named(trace, "experts")[-1].process
        killed.append(name)
        traced.server.of_role("experts")[int(name.partition("-")[2])].kill()

    trace, _, again = traced.ask(disturb=kill)
    assert again == text, "the answer is whole"
    spans = traced.collector.wait_for(trace, "POST /v1/completions", "decode")
    attempt = one(spans, "attempt")
    assert (attempt.error, attempt.attributes["gen_ai.usage.output_tokens"]) == (None, TOKENS)
    after = [span for span in spans if span.name == "exchange"][-1]
    until(
        lambda: any(span.parent_id == after.span_id for span in traced.collector.named(trace, "experts")),
        "the experts of the last exchange have come",
    )
    assert {span.process for span in traced.collector.named(trace, "experts") if span.start_ns > after.start_ns} != {
        killed[0]
    }
    whole(traced)


def worker_of(traced: Traced, trace: str) -> psutil.Process:
    """The process of the attention worker that has the request."""
    until(lambda: traced.collector.named(trace, "assign"), "the assignment has come")
    worker = traced.collector.named(trace, "assign")[0].attributes["expertmesh.worker"]
    (found,) = [each for each in traced.server.of_role("attention") if worker.startswith(incarnations_of(each.pid))]
    return found
