"""The bytes of every message are frozen: a change here is a change of the protocol between versions."""

from __future__ import annotations

import struct

import msgspec
import pytest

from services import messages, routing
from services.errors import ErrorInfo, UnreadableMessage

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
SCORES = (struct.pack("<2f", -0.5, -2.25), struct.pack("<2i", 7, 70_000), struct.pack("<2f", -0.25, -1.5))
EVENTS = [
    messages.TokenEvent(
        request_id="cmpl-1-0",
        attempt=2,
        index=1,
        token_id=8,
        logprob=messages.TokenLogprob(-0.5, [(8, -0.5)]),
        queued_ms=12,
    ),
    messages.TokenEvent(
        request_id="cmpl-1-0", attempt=2, index=2, finish="error", error=ErrorInfo(code="internal_error", message="m")
    ),
    messages.TokenEvent(
        request_id="cmpl-1-0",
        attempt=2,
        index=1,
        scores=messages.PromptScores(start=1, width=1, logprobs=SCORES[0], top_ids=SCORES[1], top_logprobs=SCORES[2]),
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
    assert (REQUEST.max_len, REQUEST.cost, REQUEST.delivered) == (11, 11, 1)


def test_what_this_release_adds_to_a_request_is_left_out_where_it_says_nothing() -> None:
    """So an earlier release reads it, and this one reads what that wrote."""
    named = msgspec.structs.replace(REQUEST, prompt="name", wire=2, cache_salt="s", queued_ms=12)
    plain = msgspec.msgpack.decode(messages.encode(named), strict=False)
    assert {name: plain.pop(name) for name in ("prompt", "wire", "cache_salt", "queued_ms")} == {
        "prompt": "name", "wire": 2, "cache_salt": "s", "queued_ms": 12,
    }  # fmt: skip
    assert messages.decode_request(msgspec.msgpack.encode(plain)) == REQUEST


def test_scores_are_charged_like_a_share_of_tokens() -> None:
    sampling = messages.SamplingParams(max_tokens=10, logprobs=3, prompt_logprobs=20)
    scored = msgspec.structs.replace(REQUEST, prompt_len=1000, token_ids=[1] * 1000, sampling=sampling)
    assert sampling.scores(1000) == 1000 * 21 + 10 * 4
    assert (scored.max_len, scored.cost) == (1010, 1010 + -(-21_040 // 32))


def test_events_round_trip_and_keep_their_layout() -> None:
    data = messages.encode(EVENTS)
    assert messages.decode_results(data) == EVENTS
    assert msgspec.msgpack.decode(data) == [
        ["token", "cmpl-1-0", 2, 1, 8, None, [-0.5, [[8, -0.5]]], None, None, 0, None, 12],
        ["token", "cmpl-1-0", 2, 2, None, "error", None, None, {"code": "internal_error", "message": "m"}, 0, None, 0],
        ["token", "cmpl-1-0", 2, 1, None, None, None, None, None, 0, [1, 1, SCORES[0], SCORES[1], SCORES[2]], 0],
        ["lost", "cmpl-1-0", 3, "lease expired"],
    ]


@pytest.mark.parametrize("message", [messages.Assign(REQUEST), messages.Cancel("cmpl-1-0", 2)])
def test_inbox_messages_round_trip(message: messages.InboxMessage) -> None:
    assert messages.decode_inbox(messages.encode(message)) == message


def test_a_shorter_event_of_an_older_sender_is_still_read() -> None:
    older = msgspec.msgpack.encode([["token", "a", 1, 0, 7]])
    assert messages.decode_results(older) == [messages.TokenEvent(request_id="a", attempt=1, index=0, token_id=7)]


def test_a_longer_event_or_request_of_a_newer_sender_is_read_without_what_is_new() -> None:
    """As gateways and workers of the release before read what this one adds."""
    longer = [[*event, "new"] for event in msgspec.msgpack.decode(messages.encode(EVENTS))[:-1]]
    assert messages.decode_results(msgspec.msgpack.encode(longer)) == EVENTS[:-1]
    newer = msgspec.msgpack.decode(messages.encode(REQUEST)) | {"new": 1}
    assert messages.decode_request(msgspec.msgpack.encode(newer)) == REQUEST


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
    process="experts-1",
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
        "weights": "",
        "process": "experts-1",
    }
    assert EXPERT.name == "experts-1"


def test_records_of_a_release_without_names_of_processes_are_read() -> None:
    plain = msgspec.msgpack.decode(messages.encode(EXPERT))
    del plain["process"]
    assert messages.decode_expert(msgspec.msgpack.encode(plain)).name == "expert-1"
    seat = {"number": 7, "worker": "expert-1", "group": 1, "host": "h", "port": 2}
    table = {"epoch": 3, "fingerprint": "f", "num_experts": 4, "groups": [], "seats": [seat]}
    assert routing.decode_table(msgspec.msgpack.encode(table)).seats[0].title == "expert-1 (seat 7)"


def test_a_newer_record_or_table_is_read_without_what_is_new() -> None:
    """As members of the release before read the name of a process."""
    newer = msgspec.msgpack.decode(messages.encode(EXPERT)) | {"new": 1}
    assert messages.decode_expert(msgspec.msgpack.encode(newer)) == EXPERT
    seat = {"number": 7, "worker": "expert-1", "group": 1, "host": "h", "port": 2, "new": 1}
    table = {"epoch": 3, "fingerprint": "f", "num_experts": 4, "groups": [], "seats": [seat]}
    assert routing.decode_table(msgspec.msgpack.encode(table)).seats[0].number == 7


def test_reports_of_a_seat_round_trip_and_keep_their_layout() -> None:
    report = messages.SeatReport(status="ready", group=2, digest="d", outstanding_rows=40)
    rows = messages.SeatRows(digest="d", rows={0: (5, 0), 3: (1, 300)})
    assert messages.decode_seat_report(messages.encode(report)) == report
    assert messages.decode_seat_rows(messages.encode(rows)) == rows
    assert msgspec.msgpack.decode(messages.encode(report)) == ["ready", 2, "d", 40, None]
    plain = msgspec.msgpack.decode(messages.encode(rows), strict=False)
    assert plain == ["d", {0: [5, 0], 3: [1, 300]}]


def test_a_gateways_load_keeps_its_layout_and_that_of_the_release_before_is_read() -> None:
    latencies = {"ttft": messages.LatencyCounts((0.5, 1.0), (2, 3, 4))}
    load = messages.GatewayLoad(up_s=9.0, cpu_s=1.0, came=5, ended=4, ttft=(1,), tpot=(2,), wire=2, latencies=latencies)
    plain = [9.0, 1.0, 5, 4, [1], [2], 2, {"ttft": [[0.5, 1.0], [2, 3, 4]]}]
    assert msgspec.msgpack.decode(messages.encode(load)) == plain
    assert messages.decode_gateway_load(messages.encode(load)) == load
    assert messages.decode_gateway_load(msgspec.msgpack.encode(plain[:-1])).latencies == {}
    assert messages.decode_gateway_load(msgspec.msgpack.encode([*plain, "new"])) == load


def test_a_shorter_report_of_an_older_worker_is_still_read() -> None:
    assert messages.decode_seat_report(msgspec.msgpack.encode(["waiting"])) == messages.SeatReport(status="waiting")


def test_a_table_and_a_group_keep_their_layout() -> None:
    group = routing.ShardGroup(number=1, experts={4: (2, 3), 0: (0, 9)})
    seat = routing.Seat(
        number=7, worker="expert-1", group=1, host="h", port=2, node="n", capacity=2.0, process="experts-0"
    )
    assert seat.title == "experts-0 (seat 7)"
    table = routing.RoutingTable(epoch=3, fingerprint="f", num_experts=4, groups=(group,), seats=(seat,))
    assert msgspec.msgpack.decode(routing.encode_table(table), strict=False) == {
        "epoch": 3,
        "fingerprint": "f",
        "num_experts": 4,
        "groups": [{"number": 1, "experts": {0: [0, 9], 4: [2, 3]}}],
        "seats": [
            {
                "number": 7,
                "worker": "expert-1",
                "group": 1,
                "host": "h",
                "port": 2,
                "node": "n",
                "capacity": 2.0,
                "process": "experts-0",
            }
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


def test_scores_of_a_prompt_one_by_one() -> None:
    scores = messages.PromptScores(start=1, width=1, logprobs=SCORES[0], top_ids=SCORES[1], top_logprobs=SCORES[2])
    assert (len(scores), scores.nbytes) == (2, 24)
    assert list(scores.each()) == [
        messages.TokenLogprob(-0.5, [(7, -0.25)]),
        messages.TokenLogprob(-2.25, [(70_000, -1.5)]),
    ]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x90\x90", b"\x91" * 100_000, msgspec.msgpack.encode([["new kind", 1]])]
)
def test_whatever_the_bytes_reading_raises_one_error(data: bytes) -> None:
    for decode in (
        messages.decode_request, messages.decode_results, messages.decode_inbox, messages.decode_worker,
        messages.decode_expert, messages.decode_seat_report, messages.decode_seat_rows, messages.decode_worker_load,
        messages.decode_gateway_load, routing.decode_table, routing.decode_group,
    ):  # fmt: skip
        with pytest.raises(UnreadableMessage):
            decode(data)
