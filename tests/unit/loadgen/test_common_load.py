"""A load that several clients can send: when its requests go out, what they ask for, and the figures of what came."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from testkit.answering import Asked, answering, reply
from testkit.load.simulated import facts

from loadgen.common_load import Arrivals, Figures, Load, figures_of, send
from loadgen.plan import Closed
from loadgen.seen import Seen
from loadgen.summary import run_of

LOAD = Load(
    url="",
    model="m",
    tokenizer="t",
    rate=None,
    requests=20,
    prompt_tokens=5,
    output_tokens=3,
    arrivals=Arrivals.CONSTANT,
)


def times(load: Load) -> list[float]:
    schedule = load.plan().load
    assert not isinstance(schedule, Closed)
    return list(schedule.times)


def prompts(load: Load) -> list[tuple[int, ...]]:
    plan = load.plan()
    each = (plan.bodies.body(plan.source.conversation(number), 0, ()) for number in range(load.requests))
    return [tuple(body["prompt"]) for body in each]


def test_arrivals_have_their_rate() -> None:
    assert times(LOAD) == [0.0] * 20
    assert times(replace(LOAD, rate=4.0)) == [number / 4 for number in range(1, 21)]
    poisson = replace(LOAD, rate=4.0, requests=20_000, arrivals=Arrivals.POISSON)
    gaps = [end - begin for begin, end in itertools.pairwise(times(poisson))]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert times(poisson) == times(poisson) != times(replace(poisson, seed=1))


def test_prompts_have_their_length_and_differ() -> None:
    found = [*prompts(LOAD), *prompts(replace(LOAD, seed=1))]
    assert {len(prompt) for prompt in found} == {5}
    assert len(set(found)) == 40
    assert prompts(LOAD) == found[:20]


def seen(sent: float, *chunks: float, tokens: int = 0) -> Seen:
    """A request that was due 0.1 s before it was sent, and whose chunks came at these times; without any it failed."""
    return Seen(
        number=0,
        scheduled=sent - 0.1,
        lag_s=0.1,
        sent=sent,
        outcome="ok" if chunks else "failed",
        first_token=chunks[0] if chunks else None,
        ended=chunks[-1] if chunks else sent,
        output_tokens=tokens or len(chunks),
        gaps=array("d", (b - a for a, b in itertools.pairwise(chunks))),
        error=None if chunks else ("http 500", "no room"),
    )


def figures(*every: Seen) -> Figures:
    return figures_of(run_of(facts(), every))


def test_figures_are_those_of_the_definitions() -> None:
    found = figures(
        seen(0.0, 0.1, 0.2, 0.4),
        seen(1.0, 1.3, 1.5, tokens=5),  # four tokens after the first, in one chunk
        seen(0.5, 0.7),  # no token after the first
        seen(1.2),
    )
    assert (found.completed, found.failed, found.error) == (3, 1, "http 500: no room")
    assert found.requests_s == pytest.approx(3 / 1.5)
    assert found.output_tokens_s == pytest.approx(9 / 1.5)
    assert found.ttft_p50_ms == pytest.approx(200)  # from sending
    assert found.tpot_p50_ms == pytest.approx(50)  # of 150 and 50
    assert found.tpot_p99_ms == pytest.approx(150)
    assert found.itl_p50_ms == pytest.approx(200)  # of 100, 200 and 200
    assert found.lag_p99_ms == pytest.approx(100)


def test_figures_without_answers_are_none() -> None:
    found = figures(seen(0.0))
    assert (found.completed, found.requests_s, found.ttft_p50_ms) == (0, 0.0, None)


def test_no_request_waits_for_an_answer() -> None:
    """The server answers nothing before it has all requests; one of them it refuses."""
    bodies: list[dict[str, Any]] = []
    whole, lock = threading.Event(), threading.Lock()
    events: Sequence[str] = (
        '{"choices":[{"text":"a"}]}',
        '{"choices":[{"text":"b","finish_reason":"length"}]}',
        '{"choices":[],"usage":{"completion_tokens":2}}',
        "[DONE]",
    )
    stream = "".join(f"data: {event}\n\n" for event in events).encode()

    def answer(asked: Asked) -> None:
        with lock:
            bodies.append(json.loads(asked.rfile.read(int(asked.headers["Content-Length"]))))
            last = len(bodies) == LOAD.requests
        if last:
            whole.set()
            reply(asked, 503, "text/plain", b"no room")
            return
        whole.wait(60)
        reply(asked, 200, "text/event-stream", stream)

    with answering(answer) as url:
        found = send(replace(LOAD, url=url, rate=1000.0))
    assert (found.completed, found.failed, found.error) == (19, 1, "http 503: no room")
    assert sorted(tuple(body["prompt"]) for body in bodies) == sorted(prompts(LOAD))
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 and body["temperature"] == 0 for body in bodies)


def test_a_server_that_is_not_there_fails_all_requests() -> None:
    found = send(replace(LOAD, url="http://127.0.0.1:1"))
    assert (found.completed, found.failed) == (0, 20)
    assert found.error is not None
    assert "no connection to 127.0.0.1:1" in found.error
