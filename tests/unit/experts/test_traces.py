"""Spans of an expert worker: one for each traced step, within the exchange that sent its rows over tcp."""

from __future__ import annotations

import msgspec
import torch
from testkit.spans import Spans

from services.experts.traces import ExpertTraces
from services.fabric.tcp.frames import Answer, TracedDispatch, decoded
from services.fabric.tcp.inbox import Call
from services.routing import ShardGroup
from services.runtime.tracing import TraceContext

GROUP = ShardGroup(number=3, experts={0: (0, 1), 2: (0, 1)})
EXCHANGE = TraceContext(11, 22)


def call(layer: int, context: bytes = EXCHANGE.packed(), *, rows: int = 2, came_ns: int = 100) -> Call:
    facts = TracedDispatch(
        call=1, epoch=1, step=5, layer=layer, micro_batch=0, rows=rows, slots=1, reduced=True, trace=context
    )
    tensors = torch.zeros(rows, 4), torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
    x_RD, ids_RK, weights_RK = tensors
    return Call(
        layer=layer,
        reduced=True,
        x_RD=x_RD,
        ids_RK=ids_RK,
        weights_RK=weights_RK,
        answer=lambda _: None,
        traced=facts if context else None,
        came_ns=came_ns,
    )


def test_a_step_has_one_span_for_all_its_layers() -> None:
    spans = Spans()
    traces = ExpertTraces(spans.tracer, GROUP, 7)
    traces.computed([call(0), call(0, b"")], 150, 250)
    assert spans.all == []
    traces.computed([call(2, came_ns=300)], 310, 400)
    experts = spans.one("experts")
    assert (experts.parent, experts.start_ns, experts.end_ns) == (EXCHANGE, 100, 400)
    facts = {name.removeprefix("expertmesh."): value for name, value in experts.attributes.items()}
    assert (facts["shard"], facts["seat"], facts["calls"], facts["rows"]) == (3, 7, 2, 4)
    assert (facts["wait_ms"], facts["compute_ms"]) == (0.0, 0.0), "60 and 190 ns"


def test_a_step_without_rows_in_the_last_layer_ends_when_it_is_idle() -> None:
    spans = Spans()
    traces = ExpertTraces(spans.tracer, GROUP, 7)
    traces.computed([call(0)], 150, 250)
    traces.end_idle()
    assert spans.one("experts").end_ns == 250
    traces.end_idle()
    assert len(spans.all) == 1


def test_bytes_that_are_no_context_make_no_span() -> None:
    spans = Spans()
    traces = ExpertTraces(spans.tracer, GROUP, 7)
    traces.computed([call(2, b"anything")], 1, 2)
    assert spans.all == []


def test_computations_are_slices_where_steps_are_traced() -> None:
    spans = Spans(steps=True)
    ExpertTraces(spans.tracer, GROUP, 7).computed([call(0, b""), call(0, b"")], 5, 9)
    layer = spans.one("layer 0")
    assert (layer.steps, layer.start_ns, layer.end_ns) == (True, 5, 9)
    assert layer.attributes["expertmesh.rows"] == 4


def test_a_context_goes_behind_all_that_older_releases_read() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(call(0).traced))
    assert sent[-1] == EXCHANGE.packed()
    older = msgspec.msgpack.encode(sent[:-1])
    assert decoded(older, TracedDispatch, "a call").trace == b"", "calls of releases without traces"
    answer = Answer(call=1, rows=1, dtype="float32")
    longer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(answer)), "a later field"]
    assert decoded(msgspec.msgpack.encode(longer), Answer, "an answer") == answer, (
        "fields that are not known are skipped"
    )
