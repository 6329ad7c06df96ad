"""Contexts of traces, which requests are sampled, what spans become in files, and what is loaded if it is off."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from testkit.collector import collecting
from testkit.spans import Spans

from services.config import Settings, require
from services.errors import ConfigError, TracingExtraMissing
from services.runtime.logs import bind_trace_id, configure_logging
from services.runtime.tracing import TraceContext, check_tracing, current_span, opening, span_here, tracing
from services.runtime.tracing import working_under as under
from services.runtime.tracing.allowance import Allowance
from services.runtime.tracing.folder import FolderExporter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_read_and_written_as_it_was() -> None:
    context = TraceContext.parse(f" {PARENT} ", "vendor=1,other=2")
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), True, "vendor=1,other=2")
    assert context.traceparent == PARENT
    assert TraceContext.parse(f"00-{TRACE}-{SPAN}-00").sampled is False
    assert TraceContext.parse(f"00-{TRACE}-{SPAN}-ff").sampled is True
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-of-later-versions").trace_hex == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\r\nx: y",
        "00-" + "g" * 32 + f"-{SPAN}-01",
    ],
)
def test_a_malformed_traceparent_is_none(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_tracestate_that_cannot_be_passed_on_is_dropped() -> None:
    assert TraceContext.parse(PARENT, "a=1," + "b" * 600).state == ""
    assert TraceContext.parse(PARENT, "a=\x00").state == ""
    assert TraceContext.parse(PARENT, ",".join(f"k{number}=1" for number in range(33))).state == ""


@pytest.mark.parametrize("state", ["what a client writes", "A=1", "1a=1", "a=b=c", "a", "a@b@c=1", "a=1,\u00e9=2"])
def test_opentelemetry_has_nothing_to_say_of_a_malformed_tracestate(
    state: str, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.trace import TraceState

    TraceState.from_header([state])
    assert caplog.records, "it would have logged what the client sent"
    caplog.clear()
    for kept in (TraceContext.parse(PARENT, state).state, TraceContext.parse(PARENT, " a=1 ,,1t@v= x-y/z ").state):
        TraceState.from_header([kept])
    assert kept == "a=1,1t@v= x-y/z"
    assert caplog.records == []


def test_a_context_fits_in_24_bytes() -> None:
    context = TraceContext.parse(PARENT)
    assert len(context.packed()) == 24
    assert TraceContext.unpack(context.packed()) == context
    assert [TraceContext.unpack(data) for data in (b"", b"short", bytes(24), bytes(25))] == [None] * 4


def test_the_client_decides_and_else_the_share() -> None:
    for share in (0.0, 1.0):
        tracer = Spans(share=share).tracer
        sampled, unsampled = (tracer.request(TraceContext(7, 8, flag, "a=1")) for flag in (True, False))
        assert (sampled.sampled, unsampled.sampled) == (True, False)
        assert (sampled.trace_id, sampled.state) == (7, "a=1")
        assert sampled.span_id != 8
        assert tracer.request(None).sampled is bool(share)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_clients_have_themselves_traced_up_to_a_rate(share: float) -> None:
    now = [100.0]
    tracer = Spans(share=share, clients=Allowance(0.5, lambda: now[0])).tracer

    def asked(*, sampled: bool = True) -> bool:
        return tracer.request(TraceContext(7, 8, sampled)).sampled  # an id below any share

    assert [asked() for _ in range(6)] == [True] * 5 + [share == 1], "ten seconds' worth at once"
    now[0] += 2.0
    assert not asked(sampled=False), "which takes nothing"
    assert [asked(), asked()] == [True, share == 1]
    now[0] += 1000.0
    assert sum(asked() for _ in range(9)) == (9 if share else 5)


def test_beyond_the_rate_a_client_s_id_does_not_count() -> None:
    spans = Spans()
    tracer = type(spans.tracer)(spans, share=0.25, clients=Allowance(0.0), draw=lambda bits: 1 << (bits - 1))
    assert not tracer.request(TraceContext(7, 8)).sampled, "7 is below any share"


def test_at_a_rate_of_zero_no_client_decides() -> None:
    tracer = Spans(share=0.0, clients=Allowance(0.0)).tracer
    assert not tracer.request(TraceContext(7, 8)).sampled
    settings = {"otlp_endpoint": "http://127.0.0.1:9", "trace_sample": 0.0, "trace_client_rate": 0.0}
    with tracing(Settings(**settings), "gateway") as opened:
        assert opened is not None
        assert not opened.request(TraceContext(7, 8)).sampled


def test_a_quarter_of_all_ids_are_sampled_at_a_quarter() -> None:
    low = iter([1, *(number << 56 for number in range(1, 256))] * 2)
    spans = Spans(share=0.25)
    tracer = type(spans.tracer)(spans, share=0.25, draw=lambda bits: next(low) if bits == 128 else 1)
    assert sum(tracer.request(None).sampled for _ in range(256)) == 64


def test_spans_know_their_parents_and_failures() -> None:
    spans = Spans()
    context = spans.tracer.request(None)
    with spans.tracer.served("POST", context, None) as request, under(request):
        assert current_span() is request
        with pytest.raises(ValueError, match="secret"), span_here("tokenize"):
            raise ValueError("secret words of a client")
    assert current_span() is None
    tokenize, post = spans.all
    assert (tokenize.parent, post.parent) == (post.context, None)
    assert (tokenize.error, tokenize.attributes["error.type"]) == ("ValueError", "ValueError")
    post.end()
    assert len(spans.all) == 2, "a span ends once"
    with span_here("nothing") as nothing:
        assert nothing is None


def test_a_line_in_a_trace_has_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway", style="json", stream=sys.stdout)
    try:
        with bind_trace_id(TRACE):
            logging.getLogger("here").info("inside")
        logging.getLogger("here").info("outside")
        logging.getLogger("here").info("by hand", extra={"trace_id": "abc"})
    finally:
        logging.getLogger().handlers.clear()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("trace_id") for line in lines] == [TRACE, None, "abc"]


def traced_to(folder: Path, **settings: Any) -> Settings:
    return Settings(trace_folder=folder, trace_sample=1.0, process="gateway", **settings)


def sent(folder: Path) -> ExportTraceServiceRequest:
    """What is in the one file, as OpenTelemetry's own classes read it. Their JSON has ids in base64."""
    (file,) = folder.glob("*.jsonl")
    (line,) = [line for line in file.read_text().splitlines() if line]
    content = json.loads(line)
    for span in content["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for part in (span, *span.get("links", [])):
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in part:
                    part[name] = base64.b64encode(bytes.fromhex(part[name])).decode()
    return json_format.ParseDict(content, ExportTraceServiceRequest())


def test_files_are_otlp(tmp_path: Path) -> None:
    with tracing(traced_to(tmp_path), "gateway") as tracer:
        assert tracer is not None
        given = TraceContext.parse(PARENT, "vendor=1")
        with tracer.served("POST", tracer.request(given), given, {"text": "a", "whole": 3, "real": 0.5}) as span:
            span.attributes |= {"yes": True, "many": ["a", "b"]}
            span.event("first token", {"n": 1}, at_ns=span.start_ns + 1)
            span.links = (TraceContext(1, 2),)
            span.fail("Broken", "why")
    (part,) = sent(tmp_path).resource_spans
    resource = {pair.key: pair.value for pair in part.resource.attributes}
    assert resource["service.name"].string_value == "expertmesh-gateway"
    assert resource["expertmesh.process"].string_value == "gateway"
    (found,) = part.scope_spans[0].spans
    assert (found.trace_id.hex(), found.parent_span_id.hex(), found.trace_state) == (TRACE, SPAN, "vendor=1")
    assert (found.name, found.kind) == ("POST", found.SPAN_KIND_SERVER)
    values = {pair.key: pair.value for pair in found.attributes}
    assert (values["text"].string_value, values["whole"].int_value, values["real"].double_value) == ("a", 3, 0.5)
    assert values["yes"].bool_value
    assert [each.string_value for each in values["many"].array_value.values] == ["a", "b"]
    assert found.events[0].name == "first token"
    assert found.events[0].time_unix_nano == found.start_time_unix_nano + 1 <= found.end_time_unix_nano + 1
    assert found.links[0].span_id.hex() == f"{2:016x}"
    assert (found.status.code, found.status.message) == (found.status.STATUS_CODE_ERROR, "why")


def test_a_file_is_bounded_and_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "gateway.jsonl").write_bytes(b'{"resourceSpans": [{"cut o')
    exporter = FolderExporter(tmp_path, "gateway", max_bytes=2000)
    settings = traced_to(tmp_path / "other")
    with tracing(settings, "gateway") as tracer:
        tracer.record("work", TraceContext(1, 2), 1, 2)
    (line,) = [line for line in (tmp_path / "other/gateway.jsonl").read_bytes().splitlines() if line]
    for _ in range(20):
        exporter._write(line + b"\n")
        if exporter._file.stat().st_size > 2000:
            break
    assert b"cut o\n{" in (tmp_path / "gateway.jsonl").read_bytes()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

    span = ReadableSpan("work", SpanContext(1, 2, False), resource=Resource({}), start_time=1, end_time=2)
    for _ in range(40):
        exporter.export([span])
    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.jsonl")}
    assert set(sizes) == {"gateway.jsonl", "gateway.former.jsonl"}
    assert sizes["gateway.jsonl"] <= 2000


def test_a_file_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    with tracing(traced_to(tmp_path / "traces"), "gateway") as tracer:
        shutil.rmtree(tmp_path / "traces")
        tracer.record("work", TraceContext(1, 2), 1, 2)
    assert sent(tmp_path / "traces").resource_spans[0].scope_spans[0].spans[0].name == "work"


def test_a_file_that_cannot_be_written_is_mentioned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

    exporter = FolderExporter(tmp_path / "traces", "gateway")
    shutil.rmtree(tmp_path / "traces")
    (tmp_path / "traces").write_text("no folder")
    span = ReadableSpan("work", SpanContext(1, 2, False), resource=Resource({}), start_time=1, end_time=2)
    assert {exporter.export([span]).name for _ in range(3)} == {"FAILURE"}
    assert len(caplog.records) == 1


def test_environment_variables_of_opentelemetry_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=x")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
        settings = Settings(trace_sample=1.0)
        assert settings.traces_have_a_place
        with tracing(settings, "scheduler") as tracer:
            assert tracer is not None
            tracer.record("queue", TraceContext(1, 2), 1, 2)
        assert [span.name for span in collector.spans] == ["queue"]
        assert (collector.resources[0]["service.name"], collector.resources[0]["team"]) == ("mine", "x")
        assert collector.headers[0]["x-key"] == "abc"


def test_a_collector_that_takes_nothing_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with collecting() as collector:
        collector.status = 400
        settings = Settings(otlp_endpoint=collector.url)
        with tracing(settings, "scheduler") as tracer:
            assert tracer is not None
            for _ in range(1200):  # more than two batches
                tracer.record("queue", TraceContext(1, 2), 1, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "the collector takes no traces; they are dropped until it does"
    ]


def test_steps_are_traced_into_files_unless_said_otherwise(tmp_path: Path) -> None:
    def traces_steps(**settings: Any) -> bool:
        with tracing(Settings(**settings), "attention") as tracer:
            assert tracer is not None
            return tracer.steps

    assert traces_steps(trace_folder=tmp_path)
    assert not traces_steps(trace_folder=tmp_path, trace_steps="off")
    assert not traces_steps(otlp_endpoint="http://127.0.0.1:9")
    assert traces_steps(otlp_endpoint="http://127.0.0.1:9", trace_steps="on")


def test_a_role_needs_a_place_for_its_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    settings = Settings(redis_url="redis://h", trace_sample=0.5)
    with pytest.raises(ConfigError, match="traces have no place to go"):
        require(settings, "scheduler")
    require(settings.model_copy(update={"trace_folder": Path("/t")}), "scheduler")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    require(settings, "scheduler")
    assert not Settings().traces_wanted, "the variable alone turns nothing on"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="Traces cannot be written"),
        tracing(traced_to(tmp_path / "file/x"), "gateway"),
    ):
        pass


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda name: None if name == "opentelemetry.sdk" else object())
    check_tracing(Settings())
    with pytest.raises(TracingExtraMissing, match=r"expertmesh\[tracing\]"):
        check_tracing(Settings(trace_sample=0.5))


_ROLES = """
import sys
TRACES = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "services.runtime.tracing.export")
from services.config import Settings
from services.runtime.tracing import tracing
from services.runtime.tracing.allowance import Allowance
import services.gateway.role, services.scheduler.role, services.attention.role, services.experts.role
import services.colocated.role
for role in ("gateway", "scheduler", "attention", "experts", "colocated"):
    with tracing(Settings(), role) as tracer:
        assert tracer is None
print(*sorted(name for name in sys.modules if name.startswith(TRACES)))
"""


def test_a_role_that_does_not_trace_does_not_import_what_traces() -> None:
    """Clients of Redis and FastAPI import OpenTelemetry's metrics by themselves where it is installed."""
    run = subprocess.run([sys.executable, "-c", _ROLES], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.split() == []
