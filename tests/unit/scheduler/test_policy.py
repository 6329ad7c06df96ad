"""The dispatch policy: exact bookkeeping of credit, affinity worth what it saves, balance, bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.messages import GenerateRequest, SamplingParams, WorkerInfo
from services.queue.scheduler_side import Claim, WorkerState
from services.scheduler.policy import CHUNK_TOKENS, HOLDERS, MAX_CHUNKS, Choice, DispatchPolicy, PrefixMemory


def request(token_ids: list[int], *, max_tokens: int = 16, name: str = "r") -> GenerateRequest:
    return GenerateRequest(
        id=name,
        attempt=1,
        token_ids=token_ids,
        prompt_len=len(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_ms=0,
        priority=5,
        tenant="t",
        reply_to="g",
    )


def worker(
    name: str, *, tokens: int = 0, requests: int = 0, credit: int = 100_000, places: int = 1000, longest: int = 100_000
) -> WorkerState:
    process: dict[str, Any] = {"fingerprint": "f", "host": "h", "pid": 1, "version": "0"}
    info = WorkerInfo(id=name, model="m", kv_tokens=credit, max_num_seqs=places, max_model_len=longest, **process)
    return WorkerState(
        info=info,
        outstanding_tokens=tokens,
        outstanding_requests=requests or int(tokens > 0),
        credit_tokens=credit,
        credit_requests=places,
    )


def busier(state: WorkerState, cost: int) -> WorkerState:
    return replace(
        state,
        outstanding_tokens=state.outstanding_tokens + cost,
        outstanding_requests=state.outstanding_requests + 1,
    )


def claims(requests: Sequence[GenerateRequest]) -> list[Claim]:
    return [Claim(request, request.token_ids) for request in requests]


def one(policy: DispatchPolicy, wanted: GenerateRequest, workers: list[WorkerState]) -> Choice:
    [choice] = policy.plan(claims([wanted]), workers).choices
    return choice


requests_ = st.lists(
    st.builds(
        lambda family, length, max_tokens: request([family] * length, max_tokens=max_tokens),
        st.integers(0, 3),
        st.integers(1, 300),
        st.integers(0, 200),
    ),
    max_size=40,
)
workers_ = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(0, 2500), st.integers(1, 8), st.integers(0, 10)), max_size=4
).map(
    lambda rows: [
        worker(f"w{i}", credit=credit, tokens=tokens, places=places, requests=held)
        for i, (credit, tokens, places, held) in enumerate(rows)
    ]
)


@given(requests_, workers_)
def test_a_plan_never_exceeds_credit_and_is_the_longest_head(
    batch: list[GenerateRequest], workers: list[WorkerState]
) -> None:
    plan = DispatchPolicy().plan(claims(batch), workers)
    assert [choice.request for choice in plan.choices] + list(plan.waiting) == batch
    state = {worker.info.id: worker for worker in workers}
    for choice in plan.choices:
        assert state[choice.worker_id].has_credit(choice.request.cost)
        state[choice.worker_id] = busier(state[choice.worker_id], choice.request.cost)
    if plan.waiting:
        assert not any(worker.has_credit(plan.waiting[0].cost) for worker in state.values())


@given(requests_, st.lists(st.integers(0, 5000), min_size=2, max_size=4))
def test_affinity_makes_no_worker_busier_than_the_prefill_it_saves(
    batch: list[GenerateRequest], outstanding: list[int]
) -> None:
    workers = [worker(f"w{i}", tokens=tokens) for i, tokens in enumerate(outstanding)]
    state = {worker.info.id: worker for worker in workers}
    for choice in DispatchPolicy().plan(claims(batch), workers).choices:
        least = min(worker.outstanding_tokens for worker in state.values())
        assert state[choice.worker_id].outstanding_tokens <= least + choice.held_tokens
        assert choice.held_tokens <= choice.request.prompt_len
        state[choice.worker_id] = busier(state[choice.worker_id], choice.request.cost)


def test_a_shared_prefix_goes_to_the_worker_that_has_it() -> None:
    policy = DispatchPolicy()
    prompt = list(range(4 * CHUNK_TOKENS))
    first = one(policy, request(prompt), [worker("a", tokens=1), worker("b")])
    assert first.worker_id == "b"
    again = one(policy, request([*prompt, 7, 8]), [worker("a"), worker("b", tokens=4 * CHUNK_TOKENS - 1)])
    assert (again.worker_id, again.held_tokens) == ("b", 4 * CHUNK_TOKENS)
    other = one(policy, request([9, *prompt]), [worker("a"), worker("b", tokens=1)])
    assert (other.worker_id, other.held_tokens) == ("a", 0)


@pytest.mark.parametrize(
    "holder",
    [worker("b", tokens=4 * CHUNK_TOKENS + 1), worker("b", places=1, requests=1)],
    ids=["costs more than it saves", "is full"],
)
def test_affinity_gives_way_where_its_worker(holder: WorkerState) -> None:
    policy = DispatchPolicy()
    prompt = list(range(4 * CHUNK_TOKENS))
    one(policy, request(prompt), [worker("b")])
    assert one(policy, request(prompt), [worker("a"), holder]).worker_id == "a"


def test_requests_without_common_prefixes_are_spread_evenly() -> None:
    batch = [request([n] * 100, name=str(n)) for n in range(40)]
    chosen = [choice.worker_id for choice in DispatchPolicy().plan(claims(batch), [worker(n) for n in "abcd"]).choices]
    assert {name: chosen.count(name) for name in "abcd"} == dict.fromkeys("abcd", 10)


def test_load_is_relative_to_what_a_worker_can_take() -> None:
    batch = [request([n] * 84, name=str(n)) for n in range(30)]
    workers = [worker("big", credit=2000), worker("small", credit=1000)]
    chosen = [choice.worker_id for choice in DispatchPolicy().plan(claims(batch), workers).choices]
    assert (chosen.count("big"), chosen.count("small")) == (20, 10)


def test_a_request_longer_than_every_context_is_hopeless_and_holds_nobody_back() -> None:
    batch = [request([1] * 60, max_tokens=5), request([1] * 20, max_tokens=5)]
    plan = DispatchPolicy().plan(claims(batch), [worker("a", longest=64), worker("b", longest=24)])
    assert plan.hopeless == batch[:1]
    assert [(choice.request, choice.worker_id) for choice in plan.choices] == [(batch[1], "a")]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400), st.sampled_from("abcdefg")), max_size=60))
def test_memory_is_bounded_and_never_claims_more_than_the_prompt(rows: list[tuple[int, int, str]]) -> None:
    memory = PrefixMemory(chunk_tokens=16, capacity=10)
    for family, length, name in rows:
        chain = memory.chain(*claims([request([family] * length)]))
        memory.remember(chain, name)
        assert len(memory) <= 10
        held = memory.held(chain)
        assert len(held) <= HOLDERS
        assert all(0 < tokens <= length for tokens in held.values())


def test_forgetting_starts_with_the_longest_prefix_least_recently_used() -> None:
    memory = PrefixMemory(chunk_tokens=16, capacity=3)
    old, new = (memory.chain(*claims([request([n] * 32)])) for n in (1, 2))
    memory.remember(old, "a")
    memory.remember(new, "b")
    assert (memory.held(old), memory.held(new)) == ({"a": 16}, {"b": 32})


def test_affinity_is_among_those_who_share_prefixes() -> None:
    prompt = request([1] * 256)
    others = [structs.replace(prompt, tenant="other"), structs.replace(prompt, cache_salt="s")]
    for scope, known in (("tenant", [False, False]), ("all", [True, False])):
        memory = PrefixMemory(scope=scope)
        memory.remember(memory.chain(*claims([prompt])), "a")
        assert memory.held(memory.chain(*claims([prompt]))) == {"a": 256}
        assert [bool(memory.held(memory.chain(other))) for other in claims(others)] == known


def test_of_a_long_prompt_the_beginning_is_looked_at() -> None:
    chain = PrefixMemory(chunk_tokens=16).chain(*claims([request(list(range(16 * MAX_CHUNKS + 100)))]))
    assert len(chain) == MAX_CHUNKS


@pytest.mark.parametrize("length", [0, CHUNK_TOKENS - 1])
def test_a_prompt_shorter_than_a_chunk_has_no_affinity(length: int) -> None:
    assert PrefixMemory().chain(*claims([request([1] * length)])) == []


def test_a_request_that_names_its_prompt_goes_to_workers_of_an_earlier_release_too() -> None:
    """It is assigned with its prompt; waiting for others would hold up all that come behind it."""
    named = Claim(structs.replace(request([]), prompt_len=100, prompt="name"), list(range(100)))
    plan = DispatchPolicy().plan([named, *claims([request([1])])], [worker("old")])
    assert [choice.worker_id for choice in plan.choices] == ["old", "old"]


def test_scores_are_charged_but_need_no_room_in_the_context() -> None:
    scored = request([1] * 90, max_tokens=10)
    scored = structs.replace(scored, sampling=structs.replace(scored.sampling, prompt_logprobs=20))
    assert (scored.max_len, scored.cost) == (100, 160)
    assert len(DispatchPolicy().plan(claims([scored]), [worker("a", longest=100)]).choices) == 1
    assert not DispatchPolicy().plan(claims([scored]), [worker("a", credit=159, tokens=1)]).choices


def suspect(name: str) -> Claim:
    return Claim(request([1] * 10, name=name), [1] * 10, suspect=True)


def unproven(name: str, count: int, *, guarded: bool = False, tokens: int = 0) -> WorkerState:
    return replace(worker(name, tokens=tokens), unproven=count, guarded=guarded)


@pytest.mark.parametrize(
    ("workers", "chosen", "waiting"),
    [
        ([unproven("busy", 2), worker("calm", tokens=500)], {"s": "calm", "r1": "busy", "r2": "busy"}, []),
        ([unproven("a", 2), unproven("b", 1, tokens=50)], {"r1": "a", "r2": "a"}, []),
        ([unproven("a", 1, guarded=True), unproven("b", 2)], {"r1": "b", "r2": "b"}, []),
        ([unproven("a", 1, guarded=True)], {}, ["r1", "r2"]),
    ],
    ids=["nothing else is without a token", "nowhere, one is kept", "nowhere, half are for others", "others wait"],
)
def test_a_suspect_goes_where(workers: list[WorkerState], chosen: dict[str, str], waiting: list[str]) -> None:
    others = [request([2], name="r1"), request([3], name="r2")]
    plan = DispatchPolicy().plan([suspect("s"), *claims(others)], workers)
    assert [(choice.request.id, choice.worker_id) for choice in plan.choices] == list(chosen.items())
    assert [item.id for item in plan.deferred] == ([] if "s" in chosen else ["s"])
    assert [item.id for item in plan.waiting] == waiting


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_suspects_take_no_more_than_half_of_the_workers_and_others_go_on(workers: int, most: int) -> None:
    idle = [worker(f"w{number}", credit=1000) for number in range(workers)]
    batch = [*(suspect(f"s{number}") for number in range(10)), *claims([request([2], name="r")])]
    plan = DispatchPolicy().plan(batch, idle)
    alone = {choice.worker_id for choice in plan.choices if choice.request.id != "r"}
    assert len(alone) == most
    assert len(plan.deferred) == 10 - most
    assert [choice.worker_id in alone for choice in plan.choices if choice.request.id == "r"] == [False] * (workers > 1)
