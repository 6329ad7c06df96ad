"""Attempts that a live worker gives up for want of experts: requeued, lost or ended, and always counted."""

from __future__ import annotations

import pytest
from msgspec import structs
from testkit.queue.indexes import check

from services.errors import ExpertUnavailable
from services.messages import AttemptLost
from services.queue.limits import QueueLimits

ERROR = ExpertUnavailable("No replica.", retry_after_s=4.0).info()


async def failures(bench, request_id):
    return int(await bench.redis.hget(bench.keys.request(request_id), "failures"))


async def test_what_streamed_is_lost_and_what_did_not_is_queued_again(bench):
    await bench.add_worker("w")
    streaming, waiting = await bench.run_on("w", bench.request("streaming"), bench.request("waiting"))
    await bench.worker.publish("w", [bench.token(streaming, 0)])
    await bench.worker.give_up("w", {"streaming": 1, "waiting": 1}, ERROR)
    assert (await bench.state("streaming"), await bench.attempt("streaming")) == ("lost", 2)
    assert (await bench.state("waiting"), await bench.attempt("waiting")) == ("queued", 1)
    assert [await failures(bench, name) for name in ("streaming", "waiting")] == [1, 1]
    *_, event = await bench.events()
    assert event == AttemptLost(request_id="streaming", attempt=2, reason="experts unavailable")
    assert await bench.outstanding("w") == (0, 0)
    assert [request.id for request in await bench.claim()] == ["waiting"]
    assert await bench.worker.publish("w", [bench.token(streaming, 1), bench.token(waiting, 0)]) == {
        "streaming",
        "waiting",
    }
    await check(bench)


async def test_repeating_it_or_giving_up_what_is_not_held_changes_nothing(bench):
    await bench.add_worker("w")
    await bench.add_worker("v")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.worker.give_up("v", {"a": 1}, ERROR)
    await bench.worker.give_up("w", {"a": 7, "nobody": 1}, ERROR)
    assert await bench.state("a") == "running"
    await bench.worker.publish("w", [bench.token(request, 0)])
    for _ in range(2):
        await bench.worker.give_up("w", {"a": 1}, ERROR)
    assert (await bench.state("a"), await bench.attempt("a"), await failures(bench, "a")) == ("lost", 2, 1)
    await bench.worker.give_up("w", {}, ERROR)
    await check(bench)


async def test_a_worker_that_leaves_may_name_suspects_which_alone_count_as_failed(bench):
    await bench.add_worker("w")
    suspect, innocent, _ = await bench.run_on("w", *map(bench.request, ("suspect", "innocent", "waiting")))
    for request in (suspect, innocent):
        await bench.worker.publish("w", [bench.token(request, 0)])
    await bench.worker.deregister("w", {"suspect": 1, "innocent": 7, "nobody": 1})
    assert [await bench.state(name) for name in ("suspect", "innocent", "waiting")] == ["lost", "lost", "queued"]
    assert [await failures(bench, name) for name in ("suspect", "innocent", "waiting")] == [1, 0, 0]
    await check(bench)


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_stuck=2)])
async def test_a_request_that_breaks_one_group_after_the_other_ends(bench):
    await bench.add_worker("w")
    await bench.add_worker("v")
    (poison,) = await bench.run_on("w", bench.request("poison"))
    await bench.worker.deregister("w", {"poison": 1})
    assert await bench.gateway.resubmit(structs.replace(poison, attempt=2))
    (claimed,) = await bench.claim()
    assert all(await bench.scheduler.assign(bench.epoch, [(claimed, "v")]))
    await bench.worker.deregister("v", {"poison": 2})
    assert await bench.state("poison") == "done"
    assert (await bench.events())[-1].error.code == "attempts_exhausted"
    assert [letter.request.id for letter in await bench.dead.list()] == ["poison"]
    await check(bench)


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=2)])
async def test_at_the_cap_it_ends_with_the_error_and_without_a_dead_letter(bench):
    await bench.add_worker("w")
    await bench.run_on("w", bench.request("a"))
    await bench.worker.give_up("w", {"a": 1}, ERROR)
    (claimed,) = await bench.claim()
    assert all(await bench.scheduler.assign(bench.epoch, [(claimed, "w")]))
    await bench.worker.give_up("w", {"a": 1}, ERROR)
    assert await bench.state("a") == "done"
    (event,) = await bench.events()
    assert (event.finish, event.error) == ("error", ERROR)
    assert await bench.dead.list() == []
    assert await bench.outstanding("w") == (0, 0)
    assert await bench.live() == 0
    await check(bench)
