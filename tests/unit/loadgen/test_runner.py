"""Runs against a null server in the same process: what clients do, and what is written of it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.load.null import SINGLES, null, plan, stats

from loadgen.answers import Answers, read_answers
from loadgen.client import Asking
from loadgen.connections import Exchange
from loadgen.drive import Part, part_of
from loadgen.manners import Manners
from loadgen.null.behaviour import Behaviour, Faults, Stall
from loadgen.plan import Closed, Limits
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals, at_once
from loadgen.summary import counts_of
from loadgen.workload.bodies import Bodies
from loadgen.workload.synthetic import Agents, Chat, Singles
from loadgen.workload.words import Lengths, Prompts


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def run(behaviour: Behaviour, **changes: object) -> tuple[Part, dict[str, float]]:
    async with null(behaviour) as url:
        part = await part_of(replace(plan(url), **changes))  # type: ignore[arg-type]
        return part, await stats(url)


async def test_every_request_goes_out_once_and_ends_once() -> None:
    part, counted = await run(Behaviour(first_s=0.01, gap_s=0.001))
    assert sorted(seen.number for seen in part.seen) == list(range(40))
    assert {seen.outcome for seen in part.seen} == {"ok"}
    assert counted["requests"] == 40
    for seen in part.seen:
        turn = SINGLES.conversation(seen.number).turns[0]
        assert (seen.prompt_tokens, seen.output_tokens) == (len(turn.content), turn.output_tokens)
        assert seen.ttft_s is not None
        assert 0.01 <= seen.ttft_s <= seen.e2e_s
        assert len(seen.gaps) == seen.output_tokens - 1


async def test_requests_go_out_at_their_times_while_earlier_ones_wait() -> None:
    load = arrivals(flat(100.0), Gaps(1.0), seed=1, requests=40)
    part, _ = await run(Behaviour(stalls=(Stall(0.0, 1.0),)), load=load)
    assert max(seen.sent for seen in part.seen) < 0.9
    for seen in part.seen:
        assert seen.scheduled == load.times[seen.number]
        assert seen.sent == pytest.approx(seen.scheduled + seen.lag_s)
        assert seen.lag_s >= 0
        assert seen.ended > 0.9


async def test_shards_send_each_request_once() -> None:
    found: list[int] = []
    for index in range(3):
        part, _ = await run(Behaviour(), shard=(index, 3))
        found += [seen.number for seen in part.seen]
    assert sorted(found) == list(range(40))


async def test_refusals_are_counted_and_sent_again_after_the_time_they_ask_for() -> None:
    refusing = Behaviour(faults=Faults(refused=0.4, retry_after_s=1))
    part, counted = await run(refusing, manners=Manners(retries=20))
    counts = counts_of(part.seen)
    assert counts.ok == 40
    assert counts.refused_429 == counts.retry_after == counts.retried == counted["refused"] > 5
    assert counts.tries == counted["requests"]
    for seen in part.seen:
        moments = [moment for moment, _, _ in seen.refusals] + [seen.ended]
        assert all(later - earlier >= 0.99 for earlier, later in itertools.pairwise(moments))
        assert seen.e2e_s >= len(seen.refusals)  # what a user waits


async def test_without_retries_what_is_refused_stays_refused() -> None:
    part, _ = await run(Behaviour(faults=Faults(refused=0.4, failed=0.3)))
    counts = counts_of(part.seen)
    assert counts.refused > 5
    assert counts.failed > 5
    assert counts.retried == 0
    assert {seen.error[0] for seen in part.seen if seen.error} == {"http 429", "http 500"}


async def test_a_broken_answer_is_sent_again_under_its_key_and_only_then() -> None:
    breaking = Behaviour(faults=Faults(broken=0.4))
    keyed, counted = await run(breaking, manners=Manners(retries=20, keyed=True, backoff_s=0.001))
    assert counts_of(keyed.seen).ok == 40
    assert counted["again"] == counts_of(keyed.seen).retried == counted["broken"] > 5
    once, counted = await run(breaking, manners=Manners(retries=20))
    assert counts_of(once.seen).failed == counted["broken"] > 5
    assert "again" not in counted


async def test_a_share_of_the_clients_hangs_up() -> None:
    source = replace(SINGLES, output_tokens=Lengths(200, 200))
    slow = Behaviour(first_s=0.01, gap_s=0.005)
    part, _ = await run(slow, manners=Manners(disconnect_share=0.5), source=source, load=at_once(60))
    left = [seen for seen in part.seen if seen.outcome == "disconnected"]
    assert 15 <= len(left) <= 45
    assert counts_of(part.seen).ok == 60 - len(left)
    assert all(seen.output_tokens < 200 for seen in left)
    assert part.connections == 60


async def test_a_server_that_answers_otherwise_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    await run(Behaviour(), record_to=path)
    answers = read_answers(path)
    assert len(answers.known) == 40
    right, _ = await run(Behaviour(), answers=answers)
    assert (counts_of(right.seen).ok, sum(seen.checked for seen in right.seen)) == (40, 40)
    wrong, counted = await run(Behaviour(faults=Faults(wrong=0.3)), answers=answers)
    assert counts_of(wrong.seen).wrong == counted["wrong"] > 3
    example = next(seen.wrong for seen in wrong.seen if seen.wrong)
    assert (example.differs_at, example.found == example.expected) == (0, False)
    unknown, _ = await run(Behaviour(), answers=Answers(source="none"))
    assert not any(seen.checked for seen in unknown.seen)


@pytest.mark.parametrize(
    ("behaviour", "changes"),
    [
        (Behaviour(), {}),
        (Behaviour(gap_s=0.01), {"manners": Manners(disconnect_share=1.0)}),
        (Behaviour(faults=Faults(broken=1.0)), {}),
        (Behaviour(first_s=1.0), {"limits": Limits(total_s=0.05)}),
    ],
    ids=["answered", "left", "broken", "late"],
)
@pytest.mark.usefixtures("no_collection")
async def test_requests_that_have_ended_leave_nothing_behind(behaviour: Behaviour, changes: dict[str, object]) -> None:
    """The collector is off while a run goes on: what is in a cycle stays in memory until its end."""
    await run(behaviour, **changes)
    assert not [each for each in gc.get_objects() if isinstance(each, Asking | Exchange)]


async def test_what_does_not_come_in_time_is_a_timeout() -> None:
    part, _ = await run(Behaviour(first_s=30.0), limits=Limits(total_s=0.2), load=at_once(3))
    assert [seen.outcome for seen in part.seen] == ["timeout"] * 3
    silent, _ = await run(Behaviour(gap_s=30.0), limits=Limits(silence_s=0.2), load=at_once(20))
    counts = counts_of(silent.seen)
    single = sum(SINGLES.conversation(number).turns[0].output_tokens == 1 for number in range(20))
    assert (counts.ok, counts.timeout) == (single, 20 - single)
    assert 0 < single < 20


@pytest.mark.parametrize("stream", [True, False])
async def test_turns_follow_one_another(stream: bool) -> None:
    lengths = Lengths(3, 3)
    chat = Chat(
        prompts=Prompts(ids=False),
        prefixes=1,
        system_tokens=5,
        turns=lengths,
        prompt_tokens=lengths,
        output_tokens=lengths,
        think_s=0.01,
        seed=0,
    )
    bodies = Bodies(endpoint="chat", model="null")
    part, _ = await run(Behaviour(first_s=0.01), source=chat, bodies=bodies, load=at_once(10), stream=stream)
    assert counts_of(part.seen).ok == 30
    for number in range(10):
        turns = [seen for seen in part.seen if seen.number == number]
        assert [seen.name for seen in turns] == ["turn 1", "turn 2", "turn 3"]
        assert all(later.scheduled > earlier.ended for earlier, later in itertools.pairwise(turns))
        assert [seen.prompt_tokens for seen in turns] == [8, 14, 20]  # three words more, and three of the answer


async def test_agents_send_tools() -> None:
    lengths = Lengths(2, 2)
    agents = Agents(
        prompts=Prompts(ids=False), steps=lengths, result_tokens=lengths, output_tokens=lengths, tools=True, seed=0
    )
    bodies = Bodies(endpoint="chat", model="null")
    taken, _ = await run(Behaviour(), source=agents, bodies=bodies, load=at_once(5))
    assert counts_of(taken.seen).ok == 10
    refused, _ = await run(Behaviour(tools=False), source=agents, bodies=bodies, load=at_once(5))
    assert counts_of(refused.seen).failed == 5


async def test_clients_of_a_closed_loop_wait_for_their_answers() -> None:
    part, _ = await run(Behaviour(first_s=0.02), load=Closed(4, 20, None))
    assert sorted(seen.number for seen in part.seen) == list(range(20))
    for seen in part.seen:
        assert sum(other.sent <= seen.sent < other.ended for other in part.seen) <= 4
    began = time.perf_counter()
    part, _ = await run(Behaviour(first_s=0.02), load=Closed(2, None, 0.3))
    assert len(part.seen) > 2
    assert time.perf_counter() - began > 0.3


async def test_a_growing_backlog_stops_a_run() -> None:
    load = arrivals(flat(200.0), Gaps(1.0), seed=0, seconds=60.0)
    began = time.perf_counter()
    part, _ = await run(Behaviour(first_s=0.1, places=5), load=load, stop_saturated=True)
    assert part.ending == "saturated"
    assert time.perf_counter() - began < 40
    assert len(part.seen) < len(load.times) / 2


async def test_a_fault_of_the_workload_ends_the_run() -> None:
    class Faulty(Singles):
        def conversation(self, number: int) -> object:  # type: ignore[override]
            raise LookupError(number)

    async with null(Behaviour()) as url:
        faulty = Faulty(prompts=Prompts(ids=True), prompt_tokens=Lengths(1, 1), output_tokens=Lengths(1, 1), seed=0)
        with pytest.raises(LookupError):
            await part_of(replace(plan(url), source=faulty, load=Closed(2, 10, None)))
