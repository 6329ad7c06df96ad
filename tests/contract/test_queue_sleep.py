"""The order to sleep and the notes of workers across Redis, and requests that a worker hands back to sleep."""

from __future__ import annotations

import asyncio

from testkit.queue.indexes import check

from services.messages import AttemptLost
from services.queue.sleep import AWAKE, MOVING, SleepNotes, SleepSwitch


def switch(bench) -> SleepSwitch:
    return SleepSwitch(bench.user("gateway"), bench.keys, bench.limits)


def notes(bench, name: str, lease_s: float = 60.0) -> SleepNotes:
    role = "experts" if name.startswith("e") else "attention"
    experts = role == "experts"
    return SleepNotes(bench.user(role), bench.keys, worker=name, lease_s=lease_s, after_attention=experts)


async def test_an_order_holds_for_all_until_another_one(bench):
    gateway, other, worker = switch(bench), switch(bench), notes(bench, "w")
    assert await worker.note(AWAKE) == (0, 0)
    assert [await gateway.order(1), await other.order(1), await other.order(2), await gateway.order(1)] == [1, 1, 2, 2]
    assert await worker.note(AWAKE) == (2, 0)
    assert await bench.scheduler.sleep_level() == 2
    assert [await gateway.order(0), await other.order(0)] == [0, 0]
    assert await worker.note(2) == (0, 0)
    assert await bench.scheduler.sleep_level() == 0


async def test_notes_say_how_far_each_is_and_end_with_their_lease(bench):
    gateway = switch(bench)
    for name, state in (("w", AWAKE), ("v", MOVING), ("e", 2)):
        await notes(bench, name).note(state)
    found = await gateway.look()
    assert (found.ordered, dict(found.notes)) == (0, {"w": AWAKE, "v": MOVING, "e": 2})
    await notes(bench, "v", lease_s=0.001).note(1)
    await asyncio.sleep(0.01)
    assert dict((await gateway.look()).notes) == {"w": AWAKE, "e": 2}
    await gateway.order(1)
    assert await bench.redis.hlen(bench.keys.sleepers) == 2, "notes of the dead are swept with an order"
    await gateway.order(0)


async def test_experts_hear_how_many_attention_workers_still_need_them(bench):
    gateway, experts = switch(bench), notes(bench, "e")
    for name, state in (("w", AWAKE), ("v", MOVING), ("u", 1), ("e2", AWAKE)):
        await notes(bench, name).note(state)
    assert await experts.note(AWAKE) == (0, 0)
    await gateway.order(1)
    assert await experts.note(AWAKE) == (1, 2)
    for name in ("w", "v"):
        await notes(bench, name).note(1)
    assert await experts.note(AWAKE) == (1, 0)
    await gateway.order(0)


async def test_registered_workers_that_note_nothing_do_not_sleep(bench, floor):
    gateway = switch(bench)
    await bench.add_worker("w")
    await floor.join("e0", "e1")
    await gateway.order(1)
    found = await gateway.look()
    assert (found.silent, found.behind) == (3, 3)
    for name in ("w", "e0"):
        await notes(bench, name).note(1)
    assert (await gateway.look()).behind == 1
    await gateway.order(0)
    assert (await gateway.look()).behind == 2, "one that serves need not wake up"


async def test_all_that_a_worker_holds_goes_back_and_counts_as_no_failure(bench):
    await bench.add_worker("w")
    begun, waiting = await bench.run_on("w", bench.request("begun"), bench.request("waiting"))
    await bench.worker.publish("w", [bench.token(begun, 0)])
    assert await bench.worker.hand_back("w") == {"waiting"}
    assert await bench.worker.hand_back("w", begun=True) == {"begun"}
    assert await bench.worker.hand_back("w", begun=True) == set()
    assert (await bench.state("begun"), await bench.attempt("begun")) == ("lost", 2)
    assert (await bench.state("waiting"), await bench.attempt("waiting")) == ("queued", 1)
    for name in ("begun", "waiting"):
        assert int(await bench.redis.hget(bench.keys.request(name), "failures")) == 0
    *_, event = await bench.events()
    assert event == AttemptLost(request_id="begun", attempt=2, reason="worker sleeps")
    assert await bench.outstanding("w") == (0, 0)
    assert await bench.worker.publish("w", [bench.token(begun, 1), bench.token(waiting, 0)]) == {"begun", "waiting"}
    await check(bench)
