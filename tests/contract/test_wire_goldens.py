"""The bytes of every message are frozen: a change here is a change of the protocol between versions."""

from __future__ import annotations

import msgspec
import pytest

from services import messages
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
