"""The bytes of every message are frozen: a change here is a change of the protocol between versions."""

from __future__ import annotations

import msgspec
import pytest

from services import messages, routing
from services.errors import ErrorInfo

REQUEST = messages.GenerateRequest(
    id="cmpl-1-0",
    attempt=2,
    token_ids=[5, 6, 7],
    prompt_len=2,
    sampling=messages.SamplingParams(max_tokens=9, temperature=0.0, seed=3, logit_bias={4: -1.5}),
    deadline_ms=1_700_000_000_000,
    priority=5,
    tenant="anonymous",
    reply_to="gw-1",
)
EVENTS = [
    messages.TokenEvent(
        request_id="cmpl-1-0", attempt=2, index=1, token_id=8, logprob=messages.TokenLogprob(-0.5, [(8, -0.5)])
    ),
    messages.TokenEvent(
        request_id="cmpl-1-0", attempt=2, index=2, finish="error", error=ErrorInfo(code="internal_error", message="m")
    ),
    messages.AttemptLost(request_id="cmpl-1-0", attempt=3, reason="lease expired"),
]


def test_request_round_trips_and_keeps_its_bytes() -> None:
    data = messages.encode(REQUEST)
    assert messages.decode_request(data) == REQUEST
    plain = msgspec.msgpack.decode(data)
    assert plain == {
        "id": "cmpl-1-0",
        "attempt": 2,
        "token_ids": [5, 6, 7],
        "prompt_len": 2,
        "sampling": {"max_tokens": 9, "temperature": 0.0, "seed": 3, "logit_bias": {4: -1.5}},
        "deadline_ms": 1_700_000_000_000,
        "priority": 5,
        "tenant": "anonymous",
        "reply_to": "gw-1",
    }
    assert (REQUEST.cost, REQUEST.delivered) == (11, 1)


def test_events_round_trip_and_keep_their_layout() -> None:
    data = messages.encode(EVENTS)
    assert messages.decode_results(data) == EVENTS
    assert msgspec.msgpack.decode(data) == [
        ["token", "cmpl-1-0", 2, 1, 8, None, [-0.5, [[8, -0.5]]], None, None, 0],
        ["token", "cmpl-1-0", 2, 2, None, "error", None, None, {"code": "internal_error", "message": "m"}, 0],
        ["lost", "cmpl-1-0", 3, "lease expired"],
    ]


@pytest.mark.parametrize("message", [messages.Assign(REQUEST), messages.Cancel("cmpl-1-0", 2)])
def test_inbox_messages_round_trip(message: messages.InboxMessage) -> None:
    assert messages.decode_inbox(messages.encode(message)) == message


def test_a_shorter_event_of_an_older_sender_is_still_read() -> None:
    older = msgspec.msgpack.encode([["token", "a", 1, 0, 7]])
    assert messages.decode_results(older) == [messages.TokenEvent(request_id="a", attempt=1, index=0, token_id=7)]


EXPERT = messages.ExpertInfo(
    id="expert-1",
    fingerprint="f",
    host="10.0.0.3",
    port=7100,
    memory_bytes=1 << 34,
    pid=9,
    version="0.1.0",
    node="n1",
    capacity=0.5,
    group=2,
    num_experts=8,
    layers=(0, 3),
)


def test_an_expert_worker_round_trips_and_keeps_its_bytes() -> None:
    data = messages.encode(EXPERT)
    assert messages.decode_expert(data) == EXPERT
    assert msgspec.msgpack.decode(data) == {
        "id": "expert-1",
        "fingerprint": "f",
        "host": "10.0.0.3",
        "port": 7100,
        "memory_bytes": 1 << 34,
        "pid": 9,
        "version": "0.1.0",
        "node": "n1",
        "capacity": 0.5,
        "metrics_url": None,
        "group": 2,
        "num_experts": 8,
        "layers": [0, 3],
        "max_experts": None,
        "pod": None,
    }


def test_reports_of_a_seat_round_trip_and_keep_their_layout() -> None:
    report = messages.SeatReport(status="ready", group=2, digest="d", outstanding_rows=40)
    rows = messages.SeatRows(digest="d", rows={0: (5, 0), 3: (1, 300)})
    assert messages.decode_seat_report(messages.encode(report)) == report
    assert messages.decode_seat_rows(messages.encode(rows)) == rows
    assert msgspec.msgpack.decode(messages.encode(report)) == ["ready", 2, "d", 40, None]
    plain = msgspec.msgpack.decode(messages.encode(rows), strict=False)
    assert plain == ["d", {0: [5, 0], 3: [1, 300]}]


def test_a_shorter_report_of_an_older_worker_is_still_read() -> None:
    assert messages.decode_seat_report(msgspec.msgpack.encode(["waiting"])) == messages.SeatReport(status="waiting")


def test_a_table_and_a_group_keep_their_layout() -> None:
    group = routing.ShardGroup(number=1, experts={4: (2, 3), 0: (0, 9)})
    seat = routing.Seat(number=7, worker="expert-1", group=1, host="h", port=2, node="n", capacity=2.0)
    table = routing.RoutingTable(epoch=3, fingerprint="f", num_experts=4, groups=(group,), seats=(seat,))
    assert msgspec.msgpack.decode(routing.encode_table(table), strict=False) == {
        "epoch": 3,
        "fingerprint": "f",
        "num_experts": 4,
        "groups": [{"number": 1, "experts": {0: [0, 9], 4: [2, 3]}}],
        "seats": [
            {"number": 7, "worker": "expert-1", "group": 1, "host": "h", "port": 2, "node": "n", "capacity": 2.0}
        ],
    }
    assert group.digest == "fb73e77796a78c3e"
    turned = routing.ShardGroup(number=1, experts={0: (0, 9), 4: (2, 3)})
    assert routing.encode_group(turned) == routing.encode_group(group)
    assert routing.decode_group(routing.encode_group(group)) == group


def test_rows_since_an_earlier_report() -> None:
    earlier = messages.SeatRows(digest="d", rows={0: (5, 0)})
    later = messages.SeatRows(digest="d", rows={0: (7, 1), 3: (2,)})
    assert later.since(earlier) == {0: (2, 1), 3: (2,)}
    assert later.since(None) == later.rows
    assert messages.SeatRows(digest="e", rows={0: (1, 1)}).since(earlier) == {0: (1, 1)}
