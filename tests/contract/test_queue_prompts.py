"""Prompts separate from records: each stored once, found again by workers, gone with the last that needs it."""

from __future__ import annotations

from array import array

import pytest
from msgspec import structs

from services.errors import InvalidRequest
from services.messages import Assign, TokenEvent, decode_inbox, decode_request, decode_results
from services.queue.limits import QueueLimits
from services.queue.prompts import pack_ids, prompt_name, unpack_ids
from services.wire import NO_PROMPT

PROMPT = [5, 70_000, 2**31 - 1, 0, 9]


def sequences(bench, count: int, *, prompt=PROMPT, tenant: str = "t"):
    asked = (bench.request(tenant=tenant, max_tokens=4) for _ in range(count))
    return [structs.replace(request, token_ids=prompt, prompt_len=len(prompt)) for request in asked]


async def prompts(bench) -> dict[str, list[int]]:
    """Those that are stored, by name."""
    found = {}
    for key in await bench.redis.keys(bench.keys.prompt("*")):
        found[key.decode().rsplit(":", 1)[1]] = unpack_ids(await bench.redis.get(key)).tolist()
    return found


async def inbox(bench, worker: str = "w"):
    _, messages = await bench.worker.read_inbox(worker, "0-0", 0)
    return [message.request for message in messages if isinstance(message, Assign)]


async def run(bench, *requests) -> None:
    await bench.admit(*requests)
    claimed = [claim.request for claim in await bench.scheduler.claim(bench.epoch, 100)]
    assert all(await bench.scheduler.assign(bench.epoch, [(request, "w") for request in claimed]))


def test_ids_keep_their_bytes():
    assert pack_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert unpack_ids(pack_ids(PROMPT)).tolist() == PROMPT
    assert unpack_ids(b"\x01\0\0\0\xff").tolist() == [1]


async def test_choices_of_a_prompt_share_it_and_workers_get_it_whole(bench):
    await bench.add_worker("w")
    requests = sequences(bench, 4)
    await run(bench, *requests)
    assert list((await prompts(bench)).values()) == [PROMPT]
    bodies = [await bench.redis.hget(bench.keys.request(request.id), "body") for request in requests]
    assert not any(pack_ids(PROMPT) in body or b"token_ids\x95" in body for body in bodies)
    assert [request.token_ids for request in await inbox(bench)] == [PROMPT] * 4
    assert {request.prompt for request in await inbox(bench)} == {""}


async def test_tenants_never_share_a_prompt(bench):
    await bench.admit(*sequences(bench, 1))
    await bench.admit(*sequences(bench, 1, tenant="other"))
    names = {prompt_name(tenant, pack_ids(PROMPT)) for tenant in ("t", "other")}
    assert len(names) == 2
    assert set(await prompts(bench)) == names


async def test_a_prompt_goes_with_the_last_request_that_needs_it(bench):
    await bench.add_worker("w")
    first, second, third = sequences(bench, 3)
    await run(bench, first, second)
    await bench.admit(third)
    await bench.worker.publish("w", [bench.token(structs.replace(first, attempt=1), 0, finish="stop")])
    await bench.gateway.cancel([second.id])
    assert len(await prompts(bench)) == 1
    await bench.gateway.cancel([third.id])
    assert await prompts(bench) == {}
    assert await bench.redis.keys(f"{bench.keys.prefix}prompt_refs:*") == []


async def test_a_refusal_stores_no_prompt(bench):
    from services.errors import QueueFull

    with pytest.raises(QueueFull):
        await bench.admit(*sequences(bench, 1100))
    assert await prompts(bench) == {}


async def test_a_claim_shows_how_a_prompt_begins(bench):
    long = list(range(20_000))
    await bench.admit(*sequences(bench, 3, prompt=long))
    claims = await bench.scheduler.claim(bench.epoch, 10)
    assert [list(claim.head) for claim in claims] == [long[:8192]] * 3
    assert [(claim.request.token_ids, claim.request.delivered) for claim in claims] == [([], 0)] * 3


async def test_a_resubmission_sends_the_prompt_only_where_it_is_missing(bench):
    await bench.add_worker("w")
    (request,) = sequences(bench, 1)
    await run(bench, request)
    attempt = await bench.gateway.resync(request.id, 1)
    again = structs.replace(request, attempt=attempt, token_ids=[*PROMPT, 7, 8])
    await bench.redis.delete(bench.keys.prompt(prompt_name("t", pack_ids(PROMPT))))
    assert await bench.gateway.resubmit(again)
    assert list((await prompts(bench)).values()) == [PROMPT]
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    assert (claim.request.token_ids, claim.request.delivered, claim.request.attempt) == ([7, 8], 2, 2)
    assert await bench.scheduler.assign(bench.epoch, [(claim.request, "w")])
    assert (await inbox(bench))[-1].token_ids == again.token_ids


async def test_a_gateway_that_writes_for_an_earlier_release_takes_the_prompt_back_into_the_record(bench):
    await bench.add_worker("w")
    (request,) = sequences(bench, 1)
    await run(bench, request)
    attempt = await bench.gateway.resync(request.id, 1)
    await bench.worker.register(
        structs.replace(bench.worker_info("old"), wire=1), 60, credit_tokens=9, credit_requests=1
    )
    await bench.gateway.look()
    await bench.gateway.resubmit(structs.replace(request, attempt=attempt, token_ids=[*PROMPT, 7]))
    assert await prompts(bench) == {}
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    assert (claim.request.token_ids, claim.request.prompt, list(claim.head)) == ([*PROMPT, 7], "", [*PROMPT, 7])


async def test_a_worker_leaves_out_a_request_whose_prompt_is_gone_and_it_is_sent_again(bench):
    await bench.add_worker("w")
    (request,) = sequences(bench, 1)
    await run(bench, request)
    await bench.redis.delete(*[bench.keys.prompt(name) for name in await prompts(bench)])
    assert await inbox(bench) == []
    await bench.expire_lease(bench.keys.leases, request.id)
    assert (await bench.scheduler.reap(bench.epoch)).lost == 1
    assert await bench.gateway.resubmit(structs.replace(request, attempt=2))
    assert list((await prompts(bench)).values()) == [PROMPT]


async def test_a_request_that_came_by_a_scheduler_of_an_earlier_release_finds_its_prompt(bench):
    """An earlier release knows nothing of separate prompts, and drops what it does not know."""
    await bench.add_worker("w")
    await bench.admit(*sequences(bench, 1))
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    await bench.scheduler.assign(bench.epoch, [(structs.replace(claim.request, prompt=""), "w")])
    assert [request.token_ids for request in await inbox(bench)] == [PROMPT]


async def read_as_before(bench, worker: str = "old"):
    """Assigned requests as an earlier release reads them: with what the messages hold, and what it knows of that."""
    entries = await bench.redis.xrange(bench.keys.inbox(worker))
    messages = [decode_inbox(fields[b"m"]) for _, fields in entries]
    found = [structs.replace(message.request, prompt="") for message in messages if isinstance(message, Assign)]
    return [(request.token_ids, request.delivered) for request in found]


async def add_old_worker(bench) -> None:
    old = structs.replace(bench.worker_info("old"), wire=1)
    await bench.worker.register(old, 60, credit_tokens=100_000, credit_requests=100)


async def test_a_worker_of_an_earlier_release_is_given_the_prompts_of_a_backlog_that_names_them(bench):
    await bench.admit(*sequences(bench, 3), *sequences(bench, 1, prompt=list(range(9000))))
    assert len(await prompts(bench)) == 2
    await add_old_worker(bench)
    claimed = [claim.request for claim in await bench.scheduler.claim(bench.epoch, 100)]
    assert all(await bench.scheduler.assign(bench.epoch, [(request, "old") for request in claimed]))
    assert await read_as_before(bench) == [(PROMPT, 0)] * 3 + [(list(range(9000)), 0)]


async def test_a_request_whose_prompt_is_nowhere_is_assigned_so_that_an_earlier_release_refuses_it(bench):
    await bench.admit(*sequences(bench, 1))
    await add_old_worker(bench)
    await bench.redis.delete(*[bench.keys.prompt(name) for name in await prompts(bench)])
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    assert await bench.scheduler.assign(bench.epoch, [(claim.request, "old")])
    assert await read_as_before(bench) == [([], -len(PROMPT))]


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
async def test_what_was_delivered_is_never_taken_for_the_prompt(bench, prompt):
    """By way of a scheduler of an earlier release, which drops the prompt's name; as long as it or longer."""
    await bench.add_worker("w")
    (request,) = sequences(bench, 1, prompt=prompt)
    await run(bench, request)
    attempt = await bench.gateway.resync(request.id, 1)
    await bench.gateway.resubmit(structs.replace(request, attempt=attempt, token_ids=[*prompt, 7, 8, 9]))
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    await bench.scheduler.assign(bench.epoch, [(structs.replace(claim.request, prompt=""), "w")])
    again = (await inbox(bench))[-1]
    assert (again.token_ids, again.delivered) == ([*prompt, 7, 8, 9], 3)
    assert (await read_as_before(bench, "w"))[1:] == [([*prompt, 7, 8, 9], 3)]


async def body_of(bench, request):
    """What its record says to whoever gets it next."""
    return decode_request(await bench.redis.hget(bench.keys.request(request.id), "body"))


def named(admitted):
    """As a gateway has them: by their prompts' names."""
    name = prompt_name("t", pack_ids(PROMPT))
    return [structs.replace(request, prompt=name, token_ids=[]) for request in admitted]


async def restate(bench, *requests, gateway=None):
    gateway = gateway or bench.gateway
    await gateway.look()
    return await gateway.restate([(request, array("i", PROMPT)) for request in requests])


async def test_what_waits_is_rewritten_when_a_member_of_an_earlier_release_comes(bench):
    waiting, gone = await bench.admit(*sequences(bench, 2))
    assert await restate(bench, *named([waiting, gone])) == 0  # everybody finds it
    assert (await body_of(bench, waiting)).token_ids == []
    await bench.gateway.cancel([gone.id])
    await add_old_worker(bench)
    unknown = structs.replace(waiting, id="unknown")
    assert await restate(bench, *named([waiting, gone, unknown])) == 1
    assert (await body_of(bench, waiting)).token_ids == PROMPT
    assert await prompts(bench) == {}
    assert await restate(bench, *named([waiting])) == 0
    (claim,) = await bench.scheduler.claim(bench.epoch, 10)
    assert (claim.request.id, claim.request.attempt, claim.request.token_ids) == (waiting.id, 1, PROMPT)


async def test_a_leader_of_an_earlier_release_has_what_waits_rewritten_and_none_has_not(bench):
    (waiting,) = await bench.admit(*sequences(bench, 1))
    await bench.scheduler.resign(bench.epoch)
    assert await restate(bench, *named([waiting])) == 0
    await bench.redis.set(bench.keys.leader, "before")
    await bench.redis.incr(f"{bench.keys.prefix}leader:epoch")
    assert await restate(bench, *named([waiting])) == 1


async def test_only_records_of_this_gateway_at_this_attempt_are_rewritten(bench):
    await bench.add_worker("w")
    (streamed,) = sequences(bench, 1)
    await run(bench, streamed)
    (streamed,) = named([structs.replace(streamed, attempt=1)])
    await bench.worker.publish("w", [bench.token(streamed, 0)])
    waiting, moved = named(await bench.admit(*sequences(bench, 2)))
    other = bench.new_gateway("g2")
    await other.heartbeat(60)
    await other.take_up(structs.replace(moved, reply_to="g2"), timeout_s=60, prompts={moved.prompt: array("i", PROMPT)})
    await add_old_worker(bench)
    later = structs.replace(waiting, attempt=2)
    assert await restate(bench, streamed, moved, later) == 0
    assert await restate(bench, waiting) == 1
    assert await restate(bench, moved, gateway=other) == 1
    assert list(await prompts(bench)) == [waiting.prompt]  # the one that runs


@pytest.mark.parametrize("state", ["claimed", "running"])
async def test_what_is_rewritten_on_its_way_to_a_worker_arrives_whole(bench, state):
    await bench.add_worker("w")
    (waiting,) = named(await bench.admit(*sequences(bench, 1)))
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    if state == "running":
        await bench.scheduler.assign(bench.epoch, [(claim.request, "w")])
    await add_old_worker(bench)
    assert await restate(bench, waiting) == 1
    if state == "claimed":
        assert await bench.scheduler.assign(bench.epoch, [(claim.request, "w")])
    assert [request.token_ids for request in await inbox(bench)] == [PROMPT]
    assert await bench.worker.hand_back("w") == {waiting.id}
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    assert await bench.scheduler.assign(bench.epoch, [(claim.request, "old")])
    assert await read_as_before(bench) == [(PROMPT, 0)]


async def test_a_long_backlog_is_rewritten_in_calls_that_hold_nobody_up(bench):
    long = list(range(60_000))
    asked = [await bench.admit(request) for request in sequences(bench, 8, prompt=long)]
    name = prompt_name("t", pack_ids(long))
    waiting = [structs.replace(request, prompt=name, token_ids=[]) for (request,) in asked]
    await add_old_worker(bench)
    await bench.gateway.look()
    before = await calls_of(bench)
    assert await bench.gateway.restate([(request, array("i", long)) for request in waiting]) == 8
    assert await calls_of(bench) - before >= 3
    assert {tuple((await body_of(bench, request)).token_ids) for request in waiting} == {tuple(long)}
    assert await prompts(bench) == {}


async def calls_of(bench) -> int:
    """Scripts that were run."""
    return int((await bench.redis.info("commandstats"))["cmdstat_evalsha"]["calls"])


async def test_a_request_refused_by_an_earlier_release_goes_on_with_its_prompt(bench):
    """Both its scheduler and its worker are of that; the gateway has not seen them yet."""
    await bench.add_worker("w")
    (request,) = named(await bench.admit(*sequences(bench, 1)))
    (claim,) = await bench.scheduler.claim(bench.epoch, 1)
    await bench.scheduler.assign(bench.epoch, [(claim.request, "w")])
    refusal = InvalidRequest(NO_PROMPT, param="prompt").info()
    event = structs.replace(bench.token(request, -len(PROMPT), finish="error", token_id=None), error=refusal)
    await bench.worker.publish("w", [event])
    attempt = await bench.gateway.resync(request.id, 1)
    again = structs.replace(request, attempt=attempt)
    assert await bench.gateway.resubmit(again, {request.prompt: array("i", PROMPT)}, by_name=False)
    assert await prompts(bench) == {}
    assert (await body_of(bench, request)).token_ids == PROMPT


@pytest.mark.parametrize("queue_limits", [QueueLimits(max_attempts=1, dead_letter_bytes=1000)])
async def test_dead_letters_keep_their_prompts_within_bounds(bench):
    await bench.add_worker("w")
    long = list(range(200))
    requests = sequences(bench, 1) + sequences(bench, 2, prompt=long)
    await run(bench, *requests)
    for request in requests:
        await bench.expire_lease(bench.keys.leases, request.id)
        assert (await bench.scheduler.reap(bench.epoch)).dead == 1
    (letter,) = await bench.dead.list()  # the newest, though it is larger than all may be
    assert letter.request.id == requests[-1].id
    assert list((await prompts(bench)).values()) == [long]
    assert (await bench.dead.show(requests[-1].id)).request.token_ids == long
    await bench.dead.drop(requests[-1].id)
    assert await prompts(bench) == {}


@pytest.mark.parametrize("queue_limits", [QueueLimits(stream_bytes=60_000)])
async def test_a_stream_that_nobody_reads_is_bounded_in_bytes(bench):
    await bench.add_worker("w")
    (request,) = await bench.run_on("w", bench.request(max_tokens=10**6))
    for index in range(400):
        event = TokenEvent(request_id=request.id, attempt=1, index=index, token_id=7)
        await bench.worker.publish("w", [event] * 20)
        assert await bench.redis.memory_usage(bench.keys.results("g1"), samples=0) <= 70_000
    first = (await bench.events())[0]
    assert first.index > 0  # a gap, which the gateway sees and mends
    ((_, newest),) = await bench.redis.xrevrange(bench.keys.results("g1"), count=1)
    assert decode_results(newest[request.id.encode()])[-1].index == 399
