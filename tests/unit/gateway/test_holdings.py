"""Memory for answers: what is counted is what there is, tenants have shares, and who has more than one gives way."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from testkit.http_peer import post
from testkit.waiting import LIMIT_S, eventually

from services.errors import WorkLimited
from services.gateway.budget import CHOICE_BYTES, JOB_BYTES, Holdings


class FakeJob:
    """What is asked of a job."""

    choices = ()
    prompt_bytes = 0

    def __init__(self, tenant: str, nbytes: int, *, read: bool = True) -> None:
        self.tenant = tenant
        self.nbytes = nbytes
        self.read = read


def hold(holdings: Holdings, tenant: str, size: int, *, read: bool = True) -> Any:
    job = FakeJob(tenant, size - JOB_BYTES, read=read)
    holdings.open(job)  # type: ignore[arg-type]
    return job


def test_a_job_counts_for_as_long_as_anybody_holds_it():
    holdings = Holdings(1000_000)
    job = hold(holdings, "a", 5000)
    reader = [job]
    del job
    assert holdings.total == 5000
    del reader
    gc.collect()
    assert holdings.total == 0


def test_half_is_for_whoever_comes_and_the_rest_in_equal_shares():
    holdings = Holdings(100_000)
    greedy = hold(holdings, "greedy", 50_000)
    holdings.check("greedy")
    holdings.grow(greedy, 10)
    holdings.check("honest")
    holdings.check("greedy")  # alone, all is its share
    modest = hold(holdings, "modest", 5_000)
    with pytest.raises(WorkLimited) as refused:
        holdings.check("greedy")
    assert refused.value.retry_after_s
    holdings.check("modest")
    holdings.check("another")
    holdings.grow(modest, 44_990)
    holdings.check("another")  # where all is taken, too: others have more than their share


def test_the_largest_of_the_largest_tenant_gives_way():
    holdings = Holdings(100_000)
    a, small, large = hold(holdings, "a", 30_000), hold(holdings, "b", 20_000), hold(holdings, "b", 50_000)
    assert not holdings.full
    holdings.grow(a, 10)
    assert holdings.full
    assert holdings.excess() == [large]
    assert (a.tenant, small.tenant) == ("a", "b")


def test_what_is_kept_for_nobody_yet_goes_before_what_is_read():
    holdings = Holdings(100_000)
    jobs = [hold(holdings, "a", 60_000), hold(holdings, "a", 30_000, read=False), hold(holdings, "b", 20_000)]
    assert holdings.excess() == [jobs[1]]


def test_as_many_give_way_as_there_have_to_and_none_of_who_has_less_than_a_share():
    holdings = Holdings(100_000)
    many = [hold(holdings, "a", 20_000) for _ in range(8)]
    modest = [hold(holdings, name, 10_000) for name in ("b", "c")]
    gone = holdings.excess()
    assert len(gone) == 4
    assert set(gone) < set(many)
    for job in gone:
        holdings.dropped(job, job.nbytes)
    assert holdings.total == 4 * 20_000 + 4 * JOB_BYTES + 2 * 10_000
    assert not holdings.full or set(holdings.excess()) < set(many)
    assert {job.tenant for job in modest} == {"b", "c"}


def test_what_ended_and_is_still_held_is_not_ended_again():
    holdings = Holdings(10_000)
    jobs = [hold(holdings, "a", 11_000)]
    assert holdings.excess() == jobs
    holdings.dropped(jobs[0], 500)
    assert holdings.full
    assert holdings.excess() == []


async def test_what_is_counted_is_what_answers_take(start, script):
    gateway = await start()
    holdings = gateway.table.holdings
    task, request = await gateway.ask(logprobs=3)
    prompt = 4 * len(gateway.ids("hello"))
    assert holdings.total == JOB_BYTES + CHOICE_BYTES + prompt
    ids = gateway.ids("the quick brown fox")
    gateway.queue.emit(*script.events(request, ids))
    assert (await task).status_code == 200
    del task
    text = len("the quick brown fox")
    expected = JOB_BYTES + CHOICE_BYTES + prompt + text + len(ids) * (4 + 8 + 12 + 3 * 8)
    async with asyncio.timeout(LIMIT_S):
        while holdings.total:
            assert holdings.total in (0, expected)
            await asyncio.sleep(0.01)
            gc.collect()


async def test_what_waits_in_the_connection_of_a_reader_counts(start, script):
    """More than the kernels hold, for a client that does not read; and where it has got to in each choice."""
    gateway = await start(max_len=2048)
    peer = await gateway.connect(post({"prompt": "hello", "n": 16, "logprobs": 5, "max_tokens": 1500, "stream": True}))
    requests = await gateway.queue.wait_for("admitted", 16)
    peer.writer.transport.pause_reading()
    for request in requests:
        gateway.queue.emit(*script.events(request, [7] * 1500))
    [job] = gateway.table.jobs()
    holdings, counted = gateway.table.holdings, JOB_BYTES + job.prompt_bytes + 16 * CHOICE_BYTES
    await eventually(lambda: job.done and holdings.total > counted + job.nbytes + 2 * 64 * 1024)
    assert holdings.total < counted + job.nbytes + 4 * 64 * 1024
    peer.writer.transport.abort()
    await eventually(lambda: holdings.total == counted + job.nbytes)


@pytest.mark.parametrize(("n", "options"), [(1, {}), (3, {}), (3, {"logprobs": 0})])
async def test_an_echo_counts_once_for_each_prompt_in_bytes(start, n, options):
    gateway = await start()
    text = "\U0001f600 \u00e9" * 5
    task, _ = await gateway.ask(prompt=[text, "hello"], echo=True, n=n, **options)
    prompts = [gateway.ids(text), gateway.ids("hello")]
    scores = sum(8 * len(ids) + 12 for ids in prompts) if options else 0  # of the first token there is none yet
    expected = JOB_BYTES + 2 * n * CHOICE_BYTES + sum(4 * len(ids) for ids in prompts) + 35 + 5 + scores
    assert gateway.table.holdings.total == expected
    task.cancel()


async def test_prompts_are_repeated_up_to_a_bound(start, monkeypatch):
    monkeypatch.setattr("services.gateway.intake._MAX_ECHO_BYTES", 12)
    gateway = await start()
    gateway.says([7])
    prompts = [gateway.ids("hello"), gateway.ids("hello")]
    assert (await gateway.post(prompt=prompts, echo=True)).status_code == 200
    refused = await gateway.post(prompt=[*prompts, gateway.ids("you")], echo=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
    gc.collect()
    assert gateway.table.holdings.total < 2 * JOB_BYTES + 3 * CHOICE_BYTES, "what was lent is given back"


async def test_an_answer_too_much_ends_with_a_typed_error_and_others_go_on(start, script):
    gateway = await start(answer_bytes=40_000)
    small, modest = await gateway.ask()
    large, greedy = await gateway.ask(n=3, logprobs=5)
    choices = [request for request in gateway.queue.admitted if request.id.startswith(greedy.id.rsplit("-", 1)[0])]
    for request in choices:
        gateway.queue.emit(*script.events(request, [7] * 180, finish=None))
    assert set(await gateway.queue.wait_for("cancelled", 3)) == {request.id for request in choices}
    answer = await large
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    gateway.queue.emit(*script.events(modest, gateway.ids("fine")))
    assert (await small).json()["choices"][0]["text"] == "fine"


async def test_a_full_gateway_says_so_before_it_queues(start):
    gateway = await start(answer_bytes=7_000)
    first, _ = await gateway.ask()
    answer = await gateway.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "work_limit_exceeded")
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    first.cancel()
