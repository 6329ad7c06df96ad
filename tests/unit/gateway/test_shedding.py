"""Whose answers end where all of them take too much: finished ones count, and other tenants' streams go on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from testkit.waiting import eventually

from services.errors import Overloaded
from services.gateway.stream import Line, Outlet

TENANTS = ("greedy", "honest")


async def finished(gateway: Any, script: Any, **options: Any) -> Any:
    """A large answer of the greedy tenant that is over."""
    task, request = await gateway.ask(tenant="greedy", logprobs=5, **options)
    [job] = [job for job in gateway.table.jobs() if job.choices[0].request.id == request.id]
    gateway.queue.emit(*script.events(request, [7] * 180))
    assert (await task).status_code == 200
    return job


async def test_finished_answers_give_way_and_another_tenants_stream_goes_on(start, script):
    gateway = await start(tenants=TENANTS, answer_bytes=45_000)
    jobs = [await finished(gateway, script) for _ in range(2)]
    readers, given_up = [job.open(at_end=True) for job in jobs], []
    for reader in readers:
        reader.give_up = lambda: given_up.append(True)  # a client that does not read is stuck
    gc.collect()
    stream, request = await gateway.ask(tenant="honest", stream=True)
    gateway.queue.emit(*script.events(request, gateway.ids("fine"), finish=None))
    gateway.queue.emit(*script.events(request, gateway.ids("fine") * 30, start=len(gateway.ids("fine"))))
    answer = await stream
    assert "[DONE]" in answer.text
    assert "error" not in answer.text
    assert given_up
    assert isinstance(jobs[0].error or jobs[1].error, Overloaded)
    assert gateway.table.holdings.total <= gateway.table.holdings.limit


async def test_who_has_less_than_a_share_is_let_in_where_all_is_taken(start, script):
    gateway = await start(tenants=TENANTS, answer_bytes=20_000)
    job = await finished(gateway, script)
    gateway.table.holdings.grow(job, 10_000)
    gateway.says("fine")
    assert (await gateway.post(tenant="honest")).status_code == 200
    assert isinstance(job.error, Overloaded)


async def test_a_kept_answer_that_gave_way_is_made_again(start, script):
    gateway = await start(tenants=TENANTS, answer_bytes=76_000)
    job = await finished(gateway, script, key="k")
    assert job.error is None
    large, _ = await gateway.ask(tenant="greedy", n=4, logprobs=5)
    for request in gateway.queue.admitted[-4:]:
        gateway.queue.emit(*script.events(request, [7] * 180, finish=None))
    await eventually(lambda: job.error is not None)
    large.cancel()
    gateway.queue.keys.clear()
    again, request = await gateway.ask(tenant="greedy", logprobs=5, key="k")
    gateway.queue.emit(*script.events(request, gateway.ids("again")))
    assert (await again).json()["choices"][0]["text"] == "again"


def outlet(send: Any, give_up: Callable[[], None], **options: Any) -> Outlet:
    scope: dict[str, Any] = {}
    Line(abort=lambda: None, expire=give_up, **options).under(scope)
    return Outlet(scope, send)


async def test_a_client_that_reads_a_little_now_and_then_is_given_up():
    now, given_up = 0.0, []

    async def send(message: Any) -> None:
        nonlocal now
        now += 40.0  # for each piece
        if len(message["body"]) > 1 and now > 100.0:
            await asyncio.Event().wait()

    to = outlet(send, lambda: given_up.append(now), now=lambda: now, stall_s=60.0, min_rate=1000.0)
    for _ in range(2):
        await to.write_in_time(b"x" * 1000)
        assert not to.aborted
    await to.write_in_time(b"x" * 1000)
    assert to.aborted
    assert len(given_up) == 1


async def test_a_client_that_reads_all_along_has_all_the_time_it_needs():
    now = 0.0

    async def send(message: Any) -> None:
        nonlocal now
        now += len(message["body"]) / 1000.0

    to = outlet(send, lambda: pytest.fail("gave it up"), now=lambda: now, stall_s=60.0, min_rate=1000.0)
    for _ in range(100):
        await to.write_in_time(b"x" * 10_000)
    assert not to.aborted


async def test_time_that_this_process_stood_still_is_nobodys_fault():
    read = asyncio.Event()

    async def send(_: Any) -> None:
        await read.wait()

    to = outlet(send, lambda: pytest.fail("gave it up"), now=lambda: 0.0, stall_s=0.01, min_rate=1e9)
    asyncio.get_running_loop().call_later(0.05, read.set)  # the clock of the loop has passed stall_s by then
    await to.write_in_time(b"x")
    assert not to.aborted
