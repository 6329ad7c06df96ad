"""Requests that may be why their workers die: they run alone until they get on, and end after a few deaths."""

from __future__ import annotations

import pytest
from msgspec import structs

from services.messages import PromptScores, TokenEvent
from services.queue.limits import QueueLimits


async def lose_worker(bench, name: str) -> None:
    """It dies, and its gateway resubmits what it hears is lost."""
    await bench.expire_lease(bench.keys.workers, name)
    await bench.scheduler.reap(bench.epoch)
    for request_id, attempt in bench.lost(await bench.events()):
        await bench.gateway.resubmit(structs.replace(bench.request(request_id), attempt=attempt))


async def claim(bench):
    return await bench.scheduler.claim(bench.epoch, 100)


async def give(bench, claims, worker: str) -> list[str]:
    """Assigns ``claims`` to ``worker``; ids of those that it got."""
    answers = await bench.scheduler.assign(bench.epoch, [(claim.request, worker) for claim in claims])
    return [claim.request.id for claim, answer in zip(claims, answers, strict=True) if answer]


async def test_what_died_without_a_token_runs_alone_until_it_has_one(bench):
    for name in ("w1", "w2", "w3"):
        await bench.add_worker(name)
    await bench.run_on("w1", *(bench.request(name) for name in ("poison", "a", "b")))
    (talking,) = await bench.run_on("w1", bench.request("talking"))
    await bench.worker.publish("w1", [bench.token(talking, 0)])
    await lose_worker(bench, "w1")
    claims = await claim(bench)
    assert {item.request.id: item.suspect for item in claims} == {
        "poison": True, "a": True, "b": True, "talking": False,
    }  # fmt: skip
    await bench.scheduler.release(bench.epoch, [item.request for item in claims])
    suspects = [item for item in await claim(bench) if item.request.id != "talking"]
    assert await give(bench, suspects, "w2") == [suspects[0].request.id]  # the others are back in the queue
    by_name = {state.info.id: state for state in await bench.scheduler.workers()}
    assert (by_name["w2"].guarded, by_name["w2"].unproven) == (True, 1)
    assert not by_name["w3"].guarded
    await bench.admit(bench.request("new"))
    later = await claim(bench)
    assert await give(bench, [item for item in later if item.request.id == "new"], "w2") == []


async def test_a_suspect_with_a_token_is_none_any_more(bench):
    await bench.add_worker("w1")
    await bench.run_on("w1", bench.request("a"))
    await lose_worker(bench, "w1")
    await bench.add_worker("w2")
    assert await give(bench, await claim(bench), "w2") == ["a"]
    again = structs.replace(bench.request("a"), attempt=2)
    await bench.worker.publish("w2", [bench.token(again, 0)])
    await bench.admit(bench.request("b"))
    assert await give(bench, await claim(bench), "w2") == ["b"]
    assert not await bench.redis.exists(f"{bench.keys.prefix}suspects")


async def test_a_suspect_does_not_join_others_that_have_no_token(bench):
    await bench.add_worker("w1")
    await bench.run_on("w1", bench.request("a"))
    await lose_worker(bench, "w1")
    suspect = await claim(bench)
    await bench.add_worker("w2")
    await bench.admit(bench.request("b"))
    (b,) = await claim(bench)
    assert await give(bench, [b], "w2") == ["b"]
    assert await give(bench, suspect, "w2") == []
    await bench.worker.publish("w2", [bench.token(b.request, 0)])
    assert await give(bench, await claim(bench), "w2") == ["a"]


async def test_only_the_suspect_fails_when_its_worker_dies_with_others(bench):
    await bench.add_worker("w1")
    await bench.run_on("w1", bench.request("poison"))
    await lose_worker(bench, "w1")
    for life in range(2, 4):
        name = f"w{life}"
        await bench.add_worker(name)
        claims = await claim(bench)
        other = [item for item in claims if item.request.id != "poison"]
        if not other:
            await bench.admit(bench.request("innocent"))
            other = await claim(bench)
        assert await give(bench, other, name) == ["innocent"]
        await bench.worker.publish(name, [bench.token(other[0].request, 0)])
        assert await give(bench, [item for item in claims if item.request.id == "poison"], name) == ["poison"]
        await lose_worker(bench, name)
    assert bench.ends(await bench.events()) == []
    assert await bench.state("poison") == "done"  # three deaths, two of them alone
    assert [letter.request.id for letter in await bench.dead.list()] == ["poison"]
    assert await bench.redis.hget(bench.keys.request("innocent"), "failures") == b"0"
    assert not await bench.redis.exists(f"{bench.keys.prefix}suspects")


def scores(request) -> TokenEvent:
    """What a worker sends after the first part of a prompt whose scores are asked for."""
    part = PromptScores(start=1, width=0, logprobs=b"\0" * 8)
    return TokenEvent(request_id=request.id, attempt=request.attempt, index=0, scores=part)


async def deaths(bench, request_id: str, sends) -> int:
    """How many workers die of the request that sends so much first, until it ends."""
    await bench.admit(bench.request(request_id))
    for life in range(1, 10):
        await bench.add_worker(f"w{life}")
        (request,) = [item.request for item in await claim(bench)]
        assert all(await bench.scheduler.assign(bench.epoch, [(request, f"w{life}")]))
        await bench.worker.publish(f"w{life}", [sends(request)])
        await lose_worker(bench, f"w{life}")
        if await bench.state(request_id) == "done":
            return life
    raise AssertionError("it lives")


async def test_scores_of_a_prompt_are_no_token(bench):
    assert await deaths(bench, "poison", scores) == 3
    assert [letter.request.id for letter in await bench.dead.list()] == ["poison"]


async def test_what_dies_after_one_token_each_time_is_stuck(bench):
    assert await deaths(bench, "poison", lambda request: bench.token(request, 0)) == 4


async def test_a_suspect_that_sent_scores_still_runs_alone(bench):
    await bench.add_worker("w1")
    await bench.run_on("w1", bench.request("a"))
    await lose_worker(bench, "w1")
    await bench.add_worker("w2")
    (a,) = await claim(bench)
    assert await give(bench, [a], "w2") == ["a"]
    await bench.worker.publish("w2", [scores(a.request)])
    await bench.admit(bench.request("b"))
    assert await give(bench, await claim(bench), "w2") == []
    await bench.worker.publish("w2", [scores(a.request), bench.token(a.request, 0)])
    assert await give(bench, await claim(bench), "w2") == ["b"]


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=8, max_stuck=8)])
async def test_what_failed_often_is_a_suspect_whatever_it_sent_until_tokens_of_two_steps(bench):
    await bench.admit(bench.request("a"))
    for name in ("w1", "w2"):
        await bench.add_worker(name)
        (a,) = await claim(bench)
        assert not a.suspect
        assert await give(bench, [a], name) == ["a"]
        for index in range(5):
            await bench.worker.publish(name, [bench.token(a.request, index)])
        await lose_worker(bench, name)
    (a,) = await claim(bench)
    assert a.suspect
    await bench.add_worker("w3")
    assert await give(bench, [a], "w3") == ["a"]
    for index, alone in ((5, True), (6, False)):
        await bench.worker.publish("w3", [bench.token(a.request, index)])
        assert [state.guarded for state in await bench.scheduler.workers()] == [alone]


async def test_an_attempt_of_which_scores_were_sent_is_lost_and_not_queued_again(bench):
    """Its gateway has them already, and would get them twice."""
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request("a"))
    await bench.worker.publish("w", [scores(request)])
    assert await bench.worker.hand_back("w") == set()
    await bench.worker.deregister("w")
    assert await bench.state("a") == "lost"


async def lose_one_with_a_suspect(bench) -> None:
    """The worker "w1" died, and had sent nothing of the request "suspect"."""
    await bench.add_worker("w1")
    await bench.run_on("w1", bench.request("suspect"))
    await lose_worker(bench, "w1")


async def test_a_worker_is_looked_at_once_for_all_that_it_is_to_get(bench):
    await lose_one_with_a_suspect(bench)
    (suspect,) = await claim(bench)
    await bench.add_worker("w2")
    await bench.admit(*(bench.request() for _ in range(20)))
    claims = await claim(bench)

    async def looks() -> int:
        return (await bench.redis.info("commandstats"))["cmdstat_hkeys"]["calls"]

    await bench.scheduler.workers()
    before = await looks()
    given = await give(bench, [*claims[:10], suspect, *claims[10:]], "w2")
    assert await looks() - before == 1
    assert given == [item.request.id for item in claims]  # it would not have been alone
    (suspect,) = await claim(bench)
    for item in claims:
        await bench.worker.publish("w2", [bench.token(item.request, 0)])
    await bench.admit(bench.request("later"))
    (later,) = await claim(bench)
    assert await give(bench, [suspect, later], "w2") == ["suspect"]


async def test_a_worker_that_was_taken_for_dead_and_lives_dies_again(bench):
    """Taking it back was cut short, so the suspect is still on its record."""
    await lose_one_with_a_suspect(bench)
    (suspect,) = await claim(bench)
    await bench.add_worker("w2")
    await bench.admit(bench.request("other"))
    (other,) = await claim(bench)
    assert await give(bench, [other], "w2") == ["other"]
    await bench.worker.publish("w2", [bench.token(other.request, 0)])
    assert await give(bench, [suspect], "w2") == ["suspect"]
    await bench.expire_lease(bench.keys.workers, "w2")
    await bench.scheduler.reap(bench.epoch, 1)
    taken = bench.lost(await bench.events())
    assert len(taken) == 1  # of two; the other is the worker's still
    held = {"suspect": 2, "other": 1}
    del held[taken[0][0]]
    assert await bench.worker.heartbeat("w2", held) == set()
    assert not await bench.redis.hexists(bench.keys.worker("w2"), "blamed")
