"""Whose answers end where all of them take too much: finished ones count, and other tenants' streams go on."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from typing import Any

import pytest
from testkit.waiting import eventually

from services.errors import Overloaded
from services.gateway.auth import ApiKey, digest
from services.gateway.stream import Line, Outlet

URL = "/v1/completions"


class Keys:
    """Two tenants."""

    async def find(self, sha256: str) -> ApiKey | None:
        return next((ApiKey(name=name, sha256=sha256) for name in ("greedy", "honest") if digest(name) == sha256), None)

    def recall(self, sha256: str) -> ApiKey | None:
        del sha256
        return None

    async def usable(self) -> bool:
        return True


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def ask(gateway: Any, name: str, **options: Any) -> tuple[asyncio.Task[Any], Any]:
    before = len(gateway.queue.admitted)
    headers = key(name) | options.pop("headers", {})
    body = {"prompt": "hello", "max_tokens": 200, **options}
    task = asyncio.create_task(gateway.http.post(URL, json=body, headers=headers))
    return task, (await gateway.queue.wait_for("admitted", before + 1))[before]


async def finished(gateway: Any, script: Any, **options: Any) -> Any:
    """A large answer of the greedy tenant that is over."""
    task, request = await ask(gateway, "greedy", logprobs=5, **options)
    [job] = [job for job in gateway.table.jobs() if job.choices[0].request.id == request.id]
    gateway.queue.emit(*script.events(request, [7] * 180))
    assert (await task).status_code == 200
    return job


async def test_finished_answers_give_way_and_another_tenants_stream_goes_on(start, script):
    gateway = await start(store=Keys(), answer_bytes=45_000)
    jobs = [await finished(gateway, script) for _ in range(2)]
    readers, given_up = [job.open(at_end=True) for job in jobs], []
    for reader in readers:
        reader.give_up = lambda: given_up.append(True)  # a client that does not read is stuck
    gc.collect()
    stream, request = await ask(gateway, "honest", stream=True)
    gateway.queue.emit(*script.events(request, gateway.ids("fine"), finish=None))
    gateway.queue.emit(*script.events(request, gateway.ids("fine") * 30, start=len(gateway.ids("fine"))))
    answer = await stream
    assert "[DONE]" in answer.text
    assert "error" not in answer.text
    assert given_up
    assert isinstance(jobs[0].error or jobs[1].error, Overloaded)
    assert gateway.table.holdings.total <= gateway.table.holdings.limit


async def test_who_has_less_than_a_share_is_let_in_where_all_is_taken(start, script):
    gateway = await start(store=Keys(), answer_bytes=20_000)
    job = await finished(gateway, script)
    gateway.table.holdings.grow(job, 10_000)
    gateway.queue.answer = lambda request: script.events(request, gateway.ids("fine"))
    answer = await gateway.http.post(URL, json={"prompt": "hello"}, headers=key("honest"))
    assert answer.status_code == 200
    assert isinstance(job.error, Overloaded)


async def test_a_kept_answer_that_gave_way_is_made_again(start, script):
    gateway = await start(store=Keys(), answer_bytes=76_000)
    job = await finished(gateway, script, headers={"Idempotency-Key": "k"})
    assert job.error is None
    large, _ = await ask(gateway, "greedy", n=4, logprobs=5)
    for request in gateway.queue.admitted[-4:]:
        gateway.queue.emit(*script.events(request, [7] * 180, finish=None))
    await eventually(lambda: job.error is not None)
    large.cancel()
    gateway.queue.keys.clear()
    again, request = await ask(gateway, "greedy", logprobs=5, headers={"Idempotency-Key": "k"})
    gateway.queue.emit(*script.events(request, gateway.ids("again")))
    assert (await again).json()["choices"][0]["text"] == "again"


async def test_a_client_that_reads_a_little_now_and_then_is_given_up():
    now, aborted = 0.0, []

    async def send(message: Any) -> None:
        nonlocal now
        now += 40.0  # for each piece
        if len(message["body"]) > 1 and now > 100.0:
            await asyncio.Event().wait()

    scope: dict[str, Any] = {}
    late = partial(aborted.append, "late")
    Line(abort=lambda: None, expire=late, now=lambda: now, stall_s=60.0, min_rate=1000.0).under(scope)
    outlet = Outlet(scope, send)
    for _ in range(2):
        await outlet.write_in_time(b"x" * 1000)
        assert not outlet.aborted
    await outlet.write_in_time(b"x" * 1000)
    assert outlet.aborted
    assert aborted == ["late"]


async def test_a_client_that_reads_all_along_has_all_the_time_it_needs():
    now = 0.0

    async def send(message: Any) -> None:
        nonlocal now
        now += len(message["body"]) / 1000.0

    scope: dict[str, Any] = {}

    def given_up() -> None:
        pytest.fail("gave it up")

    Line(abort=given_up, expire=given_up, now=lambda: now, stall_s=60.0, min_rate=1000.0).under(scope)
    outlet = Outlet(scope, send)
    for _ in range(100):
        await outlet.write_in_time(b"x" * 10_000)
    assert not outlet.aborted


async def test_time_that_this_process_stood_still_is_nobodys_fault():
    read, scope = asyncio.Event(), dict[str, Any]()

    async def send(_: Any) -> None:
        await read.wait()

    def given_up() -> None:
        pytest.fail("gave it up")

    Line(abort=given_up, expire=given_up, now=lambda: 0.0, stall_s=0.01, min_rate=1e9).under(scope)
    outlet = Outlet(scope, send)
    asyncio.get_running_loop().call_later(0.05, read.set)  # the clock of the loop has passed stall_s by then
    await outlet.write_in_time(b"x")
    assert not outlet.aborted
