"""One unbroken stream over lost attempts, duplicates, gaps and an absent Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from msgspec import structs
from testkit.waiting import LIMIT_S

from services.errors import InvalidRequest
from services.gateway.table import MAX_MISSED
from services.queue.gateway_side import Unreadable
from services.wire import NO_PROMPT

BODY = {"prompt": "hello", "max_tokens": 90}


async def ask(gateway: Any, **options: Any) -> tuple[asyncio.Task[Any], Any]:
    """A request on its way, and what the queue got for it."""
    before = len(gateway.queue.admitted)
    task = asyncio.create_task(gateway.http.post("/v1/completions", json={**BODY, **options}))
    return task, (await gateway.queue.wait_for("admitted", before + 1))[before]


async def text_of(task: asyncio.Task[Any]) -> str:
    async with asyncio.timeout(LIMIT_S):
        answer = await task
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def down_and_up(gateway: Any) -> None:
    gateway.queue.down = True
    while gateway.follower.up:
        await asyncio.sleep(0.001)
    gateway.queue.down = False
    while not gateway.follower.up:
        await asyncio.sleep(0.001)


async def test_a_lost_attempt_is_resubmitted_with_what_was_delivered(gateway, script):
    task, request = await ask(gateway)
    ids = gateway.ids("the quick brown fox — 你好")
    gateway.queue.emit(*script.events(request, ids[:4], finish=None), script.lost(request, 2))
    (again,) = await gateway.queue.wait_for("resubmitted")
    assert again.attempt == 2
    assert again.token_ids == request.token_ids + ids[:4]
    assert again.prompt_len == request.prompt_len
    # Late tokens of the old attempt are ignored, and the loss is counted once.
    gateway.queue.emit(*script.events(request, [7, 7], start=4, finish=None), script.lost(request, 2))
    gateway.queue.emit(*script.events(again, ids[4:], start=4))
    assert await text_of(task) == "the quick brown fox — 你好"
    assert len(gateway.queue.resubmitted) == 1


async def test_duplicates_are_dropped(gateway, script):
    task, request = await ask(gateway)
    ids = gateway.ids("the fox")
    gateway.queue.emit(*script.events(request, ids, finish=None), *script.events(request, ids))
    assert await text_of(task) == "the fox"


async def test_many_events_are_delivered_in_pieces_between_which_others_have_their_turns(gateway, script, monkeypatch):
    task, request = await ask(gateway)
    ids = gateway.ids("the fox")
    deliver, turns, sizes = gateway.table.deliver, [], []

    async def count() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    def delivered(events):
        time.sleep(0.03)
        sizes.append((len(events), len(turns)))
        return deliver(events)

    monkeypatch.setattr(gateway.table, "deliver", delivered)
    counting = asyncio.create_task(count())
    gateway.queue.emit(*(script.events(request, ids, finish=None) * 700), *script.events(request, ids))
    assert await text_of(task) == "the fox"
    counting.cancel()
    assert sum(size for size, _ in sizes) == 701 * len(ids)
    assert len(sizes) >= 5
    assert max(Counter(turn for _, turn in sizes).values()) == 1  # each takes 30 ms, a turn 20


async def test_a_gap_is_fenced_and_resubmitted(gateway, script):
    task, request = await ask(gateway)
    ids = gateway.ids("the lazy dog 123")
    events = script.events(request, ids)
    gateway.queue.emit(*events[:2], *events[3:])  # one event is missing, even the end came
    (again,) = await gateway.queue.wait_for("resubmitted")
    assert gateway.queue.resynced == [(request.id, 1)]
    assert (again.attempt, again.token_ids) == (2, request.token_ids + ids[:2])
    gateway.queue.emit(*script.events(again, ids[2:], start=2))
    assert await text_of(task) == "the lazy dog 123"


@pytest.mark.parametrize("index", [-5, 0])  # as an earlier release counts what was delivered, and as this one does
async def test_a_worker_that_does_not_find_the_prompt_costs_an_attempt_and_no_answer(gateway, script, index):
    task, request = await ask(gateway)
    refused = script.events(request, [5], start=index)[0]
    error = InvalidRequest(NO_PROMPT, hint="Send at least one token.", param="prompt").info()
    refused = structs.replace(refused, token_id=None, finish="error", error=error)
    gateway.queue.emit(refused)
    (again,) = await gateway.queue.wait_for("resubmitted")
    assert (again.attempt, again.token_ids) == (2, request.token_ids)
    assert gateway.queue.kept_whole == [request.id]
    ids = gateway.ids("the quick dog")
    gateway.queue.emit(*script.events(again, ids[:2], finish=None), script.lost(again, 3))
    (_, third) = await gateway.queue.wait_for("resubmitted", 2)
    assert gateway.queue.kept_whole == [request.id] * 2  # there may still be a worker of that kind
    gateway.queue.emit(*script.events(third, ids[2:], start=2))
    assert await text_of(task) == "the quick dog"


async def test_a_request_that_has_its_prompt_and_is_refused_all_the_same_ends_with_the_error(gateway, script):
    task, request = await ask(gateway)
    for attempt in (1, 2):
        error = InvalidRequest(NO_PROMPT, hint="Send at least one token.", param="prompt").info()
        (refused,) = script.events(request, [5], attempt=attempt)
        gateway.queue.emit(structs.replace(refused, token_id=None, finish="error", error=error))
        if attempt == 1:
            await gateway.queue.wait_for("resubmitted")
    assert (await task).status_code == 400


async def test_each_heartbeat_has_what_waits_written_for_those_who_are_there(gateway, script):
    task, request = await ask(gateway)
    gateway.queue.restated = []
    (waiting,) = await gateway.queue.wait_for("restated")
    assert (waiting.id, waiting.token_ids) == (request.id, request.token_ids)
    gateway.queue.emit(*script.events(request, gateway.ids("ok")))
    assert await text_of(task) == "ok"


async def test_a_gap_of_a_request_that_is_gone_ends_it(gateway, script):
    task, request = await ask(gateway)

    gateway.queue.gone = True
    gateway.queue.emit(*script.events(request, [5], start=3, finish=None))
    assert (await task).status_code == 503


async def test_unknown_requests_are_cancelled_once_they_are_not_ends(gateway, script):
    task, request = await ask(gateway)
    unknown, ended = (_renamed(request, name) for name in ("unknown", "ended"))
    gateway.queue.emit(*script.events(unknown, [5], finish=None), *script.events(ended, [5]))
    assert "unknown" in await gateway.queue.wait_for("cancelled")
    assert "ended" not in gateway.queue.cancelled
    gateway.queue.emit(*script.events(request, gateway.ids("ok")))
    assert await text_of(task) == "ok"


def _renamed(request: Any, name: str) -> Any:
    import msgspec

    return msgspec.structs.replace(request, id=name)


async def test_streams_pause_while_redis_is_away_and_go_on(gateway, script):
    task, request = await ask(gateway)
    ids = gateway.ids("the quick dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None))
    await down_and_up(gateway)
    assert gateway.queue.surveys >= 1
    assert gateway.queue.resubmitted == []
    gateway.queue.emit(*script.events(request, ids[2:], start=2))
    assert await text_of(task) == "the quick dog"


async def test_new_requests_get_503_while_redis_is_away(gateway):
    gateway.queue.down = True
    while gateway.follower.up:
        await asyncio.sleep(0.001)
    answer = await gateway.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_unavailable"
    assert 1 <= int(answer.headers["retry-after"]) <= 120


@pytest.mark.parametrize(
    ("state", "attempt", "expected"),
    [("missing", 1, 1), ("lost", 3, 3)],
)
async def test_what_redis_lost_is_resubmitted_after_its_return(gateway, script, state, attempt, expected):
    task, request = await ask(gateway)
    ids = gateway.ids("over the dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None))
    gateway.queue.survey_answer = {request.id: (state, attempt)}
    await down_and_up(gateway)
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    assert (again.attempt, again.token_ids) == (expected, request.token_ids + ids[:2])
    gateway.queue.survey_answer = {}
    gateway.queue.emit(*script.events(again, ids[2:], start=2))
    assert await text_of(task) == "over the dog"


async def test_a_resubmission_that_redis_never_heard_is_repeated(gateway, script):
    task, request = await ask(gateway)
    real, calls = gateway.queue.resubmit, []

    async def unheard(again: Any, _prompts: Any = None, **_options: Any) -> bool:
        calls.append(again)
        gateway.queue.down = True
        gateway.queue._check()
        return True

    gateway.queue.resubmit = unheard
    gateway.queue.emit(script.lost(request, 2))
    while not calls:
        await asyncio.sleep(0.001)
    gateway.queue.resubmit = real
    gateway.queue.survey_answer = {request.id: ("lost", 2)}
    gateway.queue.down = False
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    assert again.attempt == 2
    gateway.queue.survey_answer = {}
    gateway.queue.emit(*script.events(again, gateway.ids("fine")))
    assert await text_of(task) == "fine"


async def test_done_twice_without_an_end_is_resynced(start, script):
    gateway = await start(lease_s=0.04)
    task, request = await ask(gateway)
    gateway.queue.survey_answer = {request.id: ("done", 1)}
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    gateway.queue.survey_answer = {}
    assert gateway.queue.surveys >= 2
    assert again.attempt == 2
    gateway.queue.emit(*script.events(again, gateway.ids("fine")))
    assert await text_of(task) == "fine"


async def test_a_request_that_moved_to_another_gateway_ends_here(start, script):
    """The survey may see it before the stream does."""
    gateway = await start(lease_s=0.4)
    task, request = await ask(gateway)
    gateway.queue.survey_answer = {request.id: ("moved", 2)}
    await down_and_up(gateway)
    gateway.queue.gone = True
    gateway.queue.emit(*script.events(request, [5], finish="cancelled"))
    assert (await task).status_code == 503
    assert (gateway.queue.retaken, gateway.queue.resubmitted) == ([], [])


async def test_a_request_that_redis_gave_back_to_its_former_gateway_is_taken_again(start, script):
    """Nobody took it from here, so a crash erased that it came here; what was delivered stays delivered."""
    gateway = await start(lease_s=0.04)
    task, request = await ask(gateway)
    ids = gateway.ids("over the dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None))
    gateway.queue.survey_answer = {request.id: ("moved", 1)}
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    gateway.queue.survey_answer = {}
    assert gateway.queue.retaken == [request.id]
    assert (again.attempt, again.token_ids) == (2, request.token_ids + ids[:2])
    gateway.queue.emit(*script.events(again, ids[2:], start=2))
    assert await text_of(task) == "over the dog"


async def test_a_request_that_moved_while_this_gateway_was_taken_for_dead_stays_where_its_client_is(start, script):
    """Then it never learned that a client had come back elsewhere."""
    gateway = await start(lease_s=0.04, own_lease_s=0.0)  # which has lapsed at each heartbeat
    task, request = await ask(gateway)
    gateway.queue.emit(*script.events(request, gateway.ids("over"), finish=None))
    gateway.queue.survey_answer = {request.id: ("moved", 1)}
    assert (await task).status_code == 503
    assert (gateway.queue.retaken, gateway.queue.resubmitted) == ([], [])


async def test_a_request_that_another_gateway_took_ends_with_an_error_not_an_empty_answer(gateway, script):
    task, request = await ask(gateway)
    gateway.queue.gone = True
    gateway.queue.emit(*script.events(request, [5], finish="cancelled"))
    answer = await task
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


async def test_a_cancel_that_nobody_here_asked_for_is_a_lost_attempt(gateway, script):
    """The gateway stood still for longer than its lease, and was taken for dead."""
    task, request = await ask(gateway)
    ids = gateway.ids("over the lazy dog")
    (cancelled,) = script.events(request, [5], start=2, finish="cancelled")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None), cancelled)
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    assert gateway.queue.resynced == [(request.id, 1)]
    assert (again.attempt, again.token_ids) == (2, request.token_ids + ids[:2])
    gateway.queue.emit(*script.events(again, ids[2:], start=2))
    assert await text_of(task) == "over the lazy dog"


async def test_events_that_cannot_be_read_repeat_the_attempt(gateway, script):
    task, request = await ask(gateway)
    ids = gateway.ids("over the dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None), Unreadable(request.id, "of another kind"))
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    assert again.token_ids == request.token_ids + ids[:2]
    gateway.queue.emit(*script.events(again, ids[2:], start=2))
    assert await text_of(task) == "over the dog"


async def test_an_answer_that_can_never_be_read_is_an_error(gateway):
    task, request = await ask(gateway)
    for count in range(1, MAX_MISSED + 1):
        gateway.queue.emit(Unreadable(request.id, "of another kind"))
        await gateway.queue.wait_for("resubmitted", count)
    gateway.queue.emit(Unreadable(request.id, "of another kind"), Unreadable("nobody's", "either"))
    answer = await task
    assert answer.status_code == 500
    assert "of another kind" in answer.json()["error"]["message"]
    assert {request.id, "nobody's"} <= set(await gateway.queue.wait_for("cancelled", 2))


async def test_silence_beyond_every_timeout_ends_the_request(start):
    gateway = await start(lease_s=0.04, request_timeout_s=0.1)
    task, request = await ask(gateway)
    answer = await task
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert request.id in await gateway.queue.wait_for("cancelled")


async def test_an_admission_of_unknown_outcome_is_cancelled(gateway):
    async def lost_reply(*_requests: Any, **_limits: Any) -> Any:
        gateway.queue.down = True
        gateway.queue._check()

    gateway.queue.admit = lost_reply
    assert (await gateway.http.post("/v1/completions", json=BODY)).status_code == 503
    gateway.queue.down = False
    assert len(await gateway.queue.wait_for("cancelled")) == 1
    assert len(gateway.table) == 0


async def test_drain_lets_requests_end_and_refuses_new_ones(start, script):
    gateway = await start(drain_s=30)
    task, request = await ask(gateway)
    drain = asyncio.create_task(gateway.drain.run())
    while not gateway.intake.draining:
        await asyncio.sleep(0.001)
    refused = await gateway.http.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (await gateway.http.get("/ready")).status_code == 503
    gateway.queue.emit(*script.events(request, gateway.ids("last")))
    assert await text_of(task) == "last"
    await asyncio.wait_for(drain, 10)
    assert gateway.queue.cancelled == {}


async def test_drain_cuts_off_what_is_left_but_leaves_keyed_jobs_upstream(gateway):
    plain, one = await ask(gateway)
    keyed = asyncio.create_task(gateway.http.post("/v1/completions", json=BODY, headers={"Idempotency-Key": "k"}))
    await gateway.queue.wait_for("admitted", 2)
    await asyncio.sleep(0.01)
    await gateway.drain.run()
    assert [(await task).status_code for task in (plain, keyed)] == [503, 503]
    assert set(gateway.queue.cancelled) == {one.id}
