"""One unbroken stream over lost attempts, duplicates, gaps and an absent Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from msgspec import structs
from testkit.waiting import LIMIT_S, eventually

from services.errors import InvalidRequest
from services.messages import TokenEvent
from services.wire import NO_PROMPT


async def text_of(task: asyncio.Task[Any]) -> str:
    async with asyncio.timeout(LIMIT_S):
        answer = await task
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


async def test_a_lost_attempt_is_resubmitted_with_what_was_delivered(gateway, script):
    task, request = await gateway.ask()
    ids = gateway.ids("the quick brown fox — 你好")
    # Late tokens of the old attempt are ignored, and the loss is counted once.
    late = script.events(request, [7, 7], start=4, finish=None)
    gateway.queue.emit(*script.events(request, ids[:4], finish=None), script.lost(request, 2), *late)
    (again,) = await gateway.queue.wait_for("resubmitted")
    assert again.attempt == 2
    assert again.token_ids == request.token_ids + ids[:4]
    assert again.prompt_len == request.prompt_len
    gateway.queue.emit(*late, script.lost(request, 2))
    gateway.queue.emit(*script.events(again, ids[4:], start=4))
    assert await text_of(task) == "the quick brown fox — 你好"
    assert len(gateway.queue.resubmitted) == 1


async def test_many_events_are_delivered_in_pieces_between_which_others_have_their_turns(gateway, script, monkeypatch):
    task, request = await gateway.ask()
    ids = gateway.ids("the fox")
    deliver, turns, sizes = gateway.table.deliver, [], []

    async def count() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    def delivered(events, published):
        time.sleep(0.03)
        sizes.append((len(events), len(turns)))
        return deliver(events, published)

    monkeypatch.setattr(gateway.table, "deliver", delivered)
    counting = asyncio.create_task(count())
    gateway.queue.emit(*(script.events(request, ids, finish=None) * 700), *script.events(request, ids))
    assert await text_of(task) == "the fox"
    counting.cancel()
    assert sum(size for size, _ in sizes) == 701 * len(ids)
    assert len(sizes) >= 5
    assert max(Counter(turn for _, turn in sizes).values()) == 1  # each takes 30 ms, a turn 20


def no_prompt(script: Any, request: Any, **options: Any) -> TokenEvent:
    """The worker did not find the request's prompt."""
    error = InvalidRequest(NO_PROMPT, hint="Send at least one token.", param="prompt").info()
    (refused,) = script.events(request, [5], **options)
    return structs.replace(refused, token_id=None, finish="error", error=error)


@pytest.mark.parametrize("index", [-5, 0])  # as an earlier release counts what was delivered, and as this one does
async def test_a_worker_that_does_not_find_the_prompt_costs_an_attempt_and_no_answer(gateway, script, index):
    task, request = await gateway.ask()
    gateway.queue.emit(no_prompt(script, request, start=index))
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
    task, request = await gateway.ask()
    gateway.queue.emit(no_prompt(script, request))
    (again,) = await gateway.queue.wait_for("resubmitted")
    gateway.queue.emit(no_prompt(script, again))
    assert (await task).status_code == 400


async def test_each_heartbeat_has_what_waits_written_for_those_who_are_there(gateway, script):
    task, request = await gateway.ask()
    gateway.queue.restated = []
    (waiting,) = await gateway.queue.wait_for("restated")
    assert (waiting.id, waiting.token_ids) == (request.id, request.token_ids)
    gateway.queue.emit(*script.events(request, gateway.ids("ok")))
    assert await text_of(task) == "ok"


async def test_streams_pause_while_redis_is_away_and_go_on_and_new_requests_are_refused(gateway, script):
    task, request = await gateway.ask()
    ids = gateway.ids("the quick dog")
    gateway.queue.emit(*script.events(request, ids[:2], finish=None))
    gateway.queue.down = True
    await eventually(lambda: not gateway.follower.up)
    refused = await gateway.post()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_unavailable")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    gateway.queue.down = False
    await eventually(lambda: gateway.follower.up)
    assert gateway.queue.surveys >= 1
    assert gateway.queue.resubmitted == []
    gateway.queue.emit(*script.events(request, ids[2:], start=2))
    assert await text_of(task) == "the quick dog"


async def test_a_resubmission_that_redis_never_heard_is_repeated(gateway, script):
    task, request = await gateway.ask()
    real, calls = gateway.queue.resubmit, []

    async def unheard(again: Any, _prompts: Any = None, **_options: Any) -> bool:
        calls.append(again)
        gateway.queue.down = True
        gateway.queue.check_up()
        return True

    gateway.queue.resubmit = unheard
    gateway.queue.emit(script.lost(request, 2))
    await eventually(lambda: calls)
    gateway.queue.resubmit = real
    gateway.queue.down = False
    again = (await gateway.queue.wait_for("resubmitted"))[0]
    assert again.attempt == 2
    gateway.queue.emit(*script.events(again, gateway.ids("fine")))
    assert await text_of(task) == "fine"


async def test_silence_beyond_every_timeout_ends_the_request(start):
    gateway = await start(lease_s=0.04, request_timeout_s=0.1)
    task, request = await gateway.ask()
    answer = await task
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert request.id in await gateway.queue.wait_for("cancelled")


async def test_an_admission_of_unknown_outcome_is_cancelled(gateway):
    async def lost_reply(*_requests: Any, **_limits: Any) -> Any:
        gateway.queue.down = True
        gateway.queue.check_up()

    gateway.queue.admit = lost_reply
    assert (await gateway.post()).status_code == 503
    gateway.queue.down = False
    assert len(await gateway.queue.wait_for("cancelled")) == 1
    assert len(gateway.table) == 0


async def test_drain_cuts_off_what_is_left_but_leaves_keyed_jobs_upstream(gateway):
    plain, one = await gateway.ask()
    keyed, _ = await gateway.ask(key="k")
    await asyncio.sleep(0.01)
    await gateway.drain().run()
    assert [(await task).status_code for task in (plain, keyed)] == [503, 503]
    assert set(gateway.queue.cancelled) == {one.id}
