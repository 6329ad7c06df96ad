"""`expertmesh trace`: one request as a tree, a whole folder as a file for Perfetto, and what it says without either."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.config import Settings
from services.runtime.local_servers import announce
from services.runtime.run_folder import RunFolder
from services.runtime.tracing import Span, TraceContext, Tracer, tracing

MS = 1_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
BEGAN = 1_795_000_000_000 * MS
Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A request whose first attempt was lost with its worker, and an engine's step."""
    ids = Settings(trace_folder=tmp_path, trace_sample=1.0, process="gateway")

    def span(tracer: Tracer, name: str, parent: TraceContext, at: int, to: int, **facts: Any) -> Span:
        found = tracer.span(name, parent, start_ns=BEGAN + at * MS)
        found.attributes |= {key.replace("_", "."): value for key, value in facts.items()}
        found.end_ns = BEGAN + to * MS
        return found

    with tracing(ids, "gateway") as gateway:
        assert gateway is not None
        request = gateway.served("POST /v1/completions", TraceContext(77, 1), None)
        request.start_ns = BEGAN
        request.attributes |= {"expertmesh.request_id": "mine", "gen_ai.response.id": "cmpl-mine.base"}
        lost, final = (span(gateway, "attempt", request.context, at, to) for at, to in ((1, 40), (41, 99)))
        for number, attempt in enumerate((lost, final), 1):
            attempt.attributes["expertmesh.attempt"] = number
        lost.fail("attempt_lost", "attempt lost: worker lost")
        final.event("first token", at_ns=BEGAN + 50 * MS)
        for each in (lost, final, request):
            to, each.end_ns = each.end_ns or BEGAN + 100 * MS, 0
            each.end(at_ns=to)
    with tracing(ids.model_copy(update={"process": "attention-1"}), "attention") as worker:
        assert worker is not None
        worker.record("decode", final.context, BEGAN + 50 * MS, BEGAN + 98 * MS)
        for step in range(6):
            at = BEGAN + (50 + 5 * step) * MS
            worker.record("exchange", final.context, at, at + 2 * MS, {"expertmesh.phase": "decode"})
        worker.record("experts", TraceContext(77, 12345), BEGAN + 20 * MS, BEGAN + 21 * MS)
        turn = worker.step("engine step", BEGAN + 50 * MS)
        turn.attributes |= {"thread.name": "engine", "expertmesh.step.tokens": 3}
        turn.end(at_ns=BEGAN + 55 * MS)
    return tmp_path


@pytest.fixture
def served() -> Iterator[Callable[..., None]]:
    """Leaves the record of a server with these settings."""
    with ExitStack() as running:

        def serve(port: int = 8000, **settings: Any) -> None:
            values = Settings(model=Path("/models/pocket"), **settings)
            url = f"http://127.0.0.1:{port}"
            announce(running.enter_context(RunFolder()), values, url=url, redis_url="unix:///r")

        yield serve


@pytest.mark.parametrize("wanted", ["mine", "cmpl-mine.base", "mine.base", f"{77:032x}"])
def test_a_request_is_a_tree_with_its_attempts(run: Run, folder: Path, wanted: str) -> None:
    said = run(0, "trace", wanted, "--folder", str(folder)).out
    head, _, *lines = said.splitlines()
    assert f"{77:032x}" in head
    assert "request mine" in head
    names = [line.lstrip().split("  ")[0] for line in lines if "█" in line]
    assert names[:4] == ["POST /v1/completions", "├ attempt 1", "└ attempt 2", "└ decode"]
    assert "failed: attempt lost: worker lost" in lines[2]
    assert "first token at 50.00 ms" in lines[4]
    assert "exchange x 6" in said
    assert "12.00 ms" in next(line for line in lines if "exchange x 6" in line), "their times are added up"
    assert "experts (its parent was lost)" in said
    whole = run(0, "trace", wanted, "--folder", str(folder), "--all").out
    assert sum("exchange" in line for line in whole.splitlines()) == 6


def test_bars_stand_where_their_spans_were(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    lines = run(0, "trace", "mine", "--folder", str(folder)).out.splitlines()
    bars = {line.split("  ")[0].strip("├└│ "): line for line in lines if "█" in line}
    whole, first, second = (bars[name] for name in ("POST /v1/completions", "attempt 1", "attempt 2"))
    start, length = whole.index("█"), whole.count("█")
    assert abs(first.count("█") - 0.39 * length) <= 2
    assert abs(second.index("█") - start - 0.41 * length) <= 2


def test_everything_is_written_for_perfetto(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    run(0, "trace", "--folder", str(folder), "--perfetto", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(processes.values()) == {"gateway", "attention-1"}
    (step,) = [event for event in events if event["ph"] == "X"]
    assert (step["name"], step["ts"], step["dur"], processes[step["pid"]]) == ("engine step", 5e4, 5e3, "attention-1")
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["args"], counter["ts"]) == ({"value": 3}, 5e4)
    begins, ends = ([event for event in events if event["ph"] == kind] for kind in "be")
    assert sorted(event["name"] for event in begins) == sorted(event["name"] for event in ends)
    rows = {event["id"] for event in begins if event["name"] in ("attempt", "decode")}
    assert len(rows) == 2, "an attempt and what is within it have a row"
    one = tmp_path / "one.json"
    run(0, "trace", "mine", "--folder", str(folder), "--perfetto", str(one))
    assert not [event for event in json.loads(one.read_text())["traceEvents"] if event["ph"] == "X"]


def test_a_line_that_was_cut_off_is_skipped(run: Run, folder: Path) -> None:
    with (folder / "gateway.jsonl").open("ab") as file:
        file.write(b'{"resourceSpans": [{"mine')
    assert "attempt 2" in run(0, "trace", "mine", "--folder", str(folder)).out


def test_without_a_trace_it_says_why(run: Run, folder: Path, served: Callable[..., None], tmp_path: Path) -> None:
    assert "There is no request other in" in run(1, "trace", "other", "--folder", str(folder)).err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "There are no traces in" in run(1, "trace", "mine", "--folder", str(empty)).err
    assert "No server runs on this machine" in run(2, "trace", "mine").err
    assert "No request is given" in run(2, "trace", "--folder", str(folder)).err
    served()
    assert "does not trace requests. Start it with `--trace-sample 1`" in run(1, "trace", "mine").err
    served(8001, otlp_endpoint="http://collector:4318")
    assert "Several servers run" in run(2, "trace", "mine").err
    assert "go to a collector alone" in run(1, "trace", "mine", "--url", "127.0.0.1:8001").err
    served(8002, trace_folder=folder)
    assert "attempt 2" in run(0, "trace", "mine", "--url", "http://127.0.0.1:8002/v1").out


def test_a_request_that_was_not_sampled_is_not_called_unknown(run: Run, tmp_path: Path) -> None:
    settings = Settings(trace_folder=tmp_path, trace_sample=0.01, process="gateway")
    with tracing(settings, "gateway") as tracer:
        assert tracer is not None
        tracer.record("x", TraceContext(1, 2), 1, 2)
    said = run(1, "trace", "other", "--folder", str(tmp_path)).err
    assert "traces 1 % of its requests" in said
    assert "traceparent" in said


FOREIGN: Any = {
    "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]},
    "scopeSpans": [
        {
            "spans": [
                {
                    "traceId": "0AF7651916CD43DD8448EB211C80319C",
                    "spanId": "B7AD6B7169203331",
                    "startTimeUnixNano": "1000000",
                    "endTimeUnixNano": 9000000,
                    "attributes": [
                        {"key": "none", "value": {}},
                        {
                            "key": "map",
                            "value": {"kvlistValue": {"values": [{"key": "a", "value": {"intValue": "1"}}]}},
                        },
                    ],
                    "status": {"code": "STATUS_CODE_ERROR"},
                    "events": [{"timeUnixNano": "2"}],
                },
            ]
        },
        {"scope": {"name": "empty"}},
    ],
}


def test_files_of_a_collector_are_read(run: Run, tmp_path: Path) -> None:
    """Ids in capitals, times as numbers, fields left out that have their default, and lines of metrics among them."""
    lines = [{"resourceMetrics": []}, [], {"resourceSpans": [FOREIGN, {"scopeSpans": []}]}]
    (tmp_path / "otel.json").write_text("\n".join(map(json.dumps, lines)))
    said = run(0, "trace", TRACE.upper(), "--folder", str(tmp_path)).out
    assert "shop" in said
    assert "8.00 ms" in said
    assert "failed: failed" in said
    run(0, "trace", "--perfetto", str(tmp_path / "all.perfetto"), "--folder", str(tmp_path))
    assert '"map": {"a": 1}' in (tmp_path / "all.perfetto").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        {"resourceSpans": 5},
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": TRACE}]}]}]},
        {
            "resourceSpans": [
                {"scopeSpans": [{"spans": [FOREIGN["scopeSpans"][0]["spans"][0] | {"startTimeUnixNano": "soon"}]}]}
            ]
        },
        {"resourceSpans": [{"resource": {"attributes": {"service.name": "x"}}, "scopeSpans": []}]},
    ],
)
def test_spans_that_are_not_otlp_are_named(run: Run, tmp_path: Path, wrong: Any) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n" + json.dumps(wrong))
    said = run(1, "trace", "--perfetto", str(tmp_path / "x"), "--folder", str(tmp_path)).err
    assert f"Line 2 of {tmp_path}/other.jsonl has spans that are not in OTLP's JSON." in said
