"""The batch manager, driven by a fake model whose next token is a function of the sequence so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.engines import ask
from testkit.models.pieces import pieces
from testkit.queue.scores import packed, prompt_scores

from services.attention.batching.blocks import BlockPool
from services.attention.batching.manager import BatchManager
from services.attention.sequences.plan import BatchLimits, Outcome, Piece, StepPlan
from services.errors import InternalError
from services.messages import GenerateRequest, TokenEvent, TokenLogprob

VOCAB, EOS = 11, 0


def endless(name: str, prompt: list[int], max_tokens: int, **options: Any) -> GenerateRequest:
    return ask(name, prompt, max_tokens, ignore_eos=True, **options)


def next_token(tokens: list[int]) -> int:
    """The fake model. Ends (EOS) now and then."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) * 7 + len(tokens)) % VOCAB


def expected(asked: GenerateRequest) -> list[int]:
    """What ``asked`` must generate, all attempts together."""
    tokens = list(asked.token_ids)
    while len(tokens) < asked.max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not asked.sampling.ignore_eos:
            break
    return tokens[asked.prompt_len :]


@dataclass
class Harness:
    """Runs a batch manager and checks, at every step, that what a piece reads was computed and is not overwritten."""

    blocks: int = 8
    block_size: int = 2
    budget: int = 8
    seqs: int = 4
    cache: bool = True
    max_model_len: int = 64
    now: int = 0
    seconds: float = 1.0
    """By the timer of durations."""
    events: list[TokenEvent] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = BatchLimits(
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            prefix_cache=self.cache,
        )
        self.pool = BlockPool(self.blocks, self.block_size)
        self.batch = BatchManager(limits, self.pool, lambda: self.now, timer=lambda: self.seconds)
        self.slots: dict[int, tuple[int, ...]] = {}  # slot -> the prefix whose last token's KV it holds

    def step(self, outcome: Callable[[Piece], Outcome] | None = None) -> StepPlan:
        plan = self.batch.plan()
        for piece in pieces(plan):
            self._write(piece)
        for piece in pieces(plan):
            self._read(piece)
        self._check_budget(plan)
        self.zeroed = self.batch.complete(plan, [(outcome or self.outcome)(piece) for piece in pieces(plan)])
        self.plans.append(plan)
        self.events += self.batch.drain()
        return plan

    def run(self, limit: int = 2000) -> None:
        while self.batch.has_work:
            self.step()
            limit -= 1
            assert limit, "no end in sight"

    def outcome(self, piece: Piece) -> Outcome:
        scores = [TokenLogprob(-float(position)) for position in piece.scored]
        found = packed(piece.scored.start, scores) if scores else None
        if not piece.draws:
            return Outcome(scores=found)
        return Outcome(token_id=next_token(piece.state.token_ids), scores=found)

    def add(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.batch.add(request)

    def _slot(self, piece: Piece, position: int) -> int:
        return piece.state.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, piece: Piece) -> None:
        assert piece.length > 0
        for position in range(piece.start, piece.end):
            self.slots[self._slot(piece, position)] = tuple(piece.state.token_ids[: position + 1])

    def _read(self, piece: Piece) -> None:
        for position in range(piece.end):
            assert self.slots[self._slot(piece, position)] == tuple(piece.state.token_ids[: position + 1])

    def _check_budget(self, plan: StepPlan) -> None:
        names = [piece.state.request.id for piece in pieces(plan)]
        assert len(names) == len(set(names)) <= self.seqs
        assert plan.tokens <= self.budget

    def tokens(self, name: str) -> list[int]:
        return [e.token_id for e in self.events if e.request_id == name and e.token_id is not None]

    def end(self, name: str) -> TokenEvent:
        (end,) = (event for event in self.events if event.request_id == name and event.finish)
        return end


prompts = st.lists(st.integers(1, 3), min_size=1, max_size=9)


@settings(max_examples=250, deadline=None)
@given(
    asked=st.lists(st.tuples(prompts, st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=8),
    blocks=st.integers(2, 12),
    budget=st.integers(1, 9),
    seqs=st.integers(1, 5),
    cache=st.booleans(),
    arrivals=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    scored=st.integers(0, 7),
    wire=st.sampled_from([1, 2]),
)
def test_every_request_ends_once_with_the_tokens_it_gets_alone(
    asked: list[tuple[list[int], int, int]],
    blocks: int,
    budget: int,
    seqs: int,
    cache: bool,
    arrivals: list[int],
    scored: int,
    wire: int,
) -> None:
    run = Harness(blocks=blocks, budget=budget, seqs=seqs, cache=cache)
    requests = [
        ask(f"r{i}", tokens, length, priority=priority, wire=wire, prompt_logprobs=0 if i == scored else None)
        for i, (tokens, length, priority) in enumerate(asked)
    ]
    for item, wait in zip(requests, arrivals, strict=False):
        run.batch.add(item)
        for _ in range(wait):
            run.step()
    run.run()
    for item in requests:
        end = run.end(item.id)
        if item.max_len > blocks * run.block_size:
            assert end.error is not None
            assert end.error.code == "context_length_exceeded"
            continue
        indices = [e.index for e in run.events if e.request_id == item.id and e.token_id is not None]
        assert indices == list(range(len(indices)))
        assert run.tokens(item.id) == expected(item)
        assert end.finish == ("stop" if run.tokens(item.id)[-1:] == [EOS] else "length")
        if item.sampling.prompt_logprobs is not None:
            wanted = [None, *(TokenLogprob(-float(p)) for p in range(1, item.prompt_len))]
            assert prompt_scores(e for e in run.events if e.request_id == item.id) == wanted
    assert all((event.scores if wire == 1 else event.prompt_logprobs) is None for event in run.events)
    assert not any(event.index for event in run.events if event.prompt_logprobs is not None)
    assert run.pool.used == 0
    assert run.batch.held() == {}
    assert (run.batch.running, run.batch.waiting) == (0, 0)


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 4), prompts, st.integers(1, 3)),
            st.tuples(st.just("cancel"), st.integers(0, 4), st.just([1]), st.integers(1, 3)),
            st.tuples(st.just("step"), st.just(0), st.just([1]), st.just(1)),
            st.tuples(st.just("fail"), st.just(0), st.just([1]), st.just(1)),
        ),
        max_size=40,
    ),
    blocks=st.integers(6, 9),
)
def test_any_mix_of_adds_cancels_and_failures_ends_every_accepted_attempt_once(
    actions: list[tuple[str, int, list[int], int]], blocks: int
) -> None:
    run = Harness(blocks=blocks, budget=4)
    accepted: list[tuple[str, int]] = []
    superseded: list[tuple[str, int]] = []
    for action, number, tokens, attempt in actions:
        name = f"r{number}"
        before = run.batch.held().get(name)
        if action == "add":
            run.add(ask(name, tokens, 3, attempt=attempt))
            if before is None or before < attempt:
                accepted.append((name, attempt))
                superseded += [] if before is None else [(name, before)]
            assert run.batch.held().get(name, 0) == max(before or 0, attempt)
        elif action == "cancel":
            run.batch.cancel(name, attempt)
            assert (name in run.batch.held()) == (before is not None and before > attempt)
        elif action == "fail":
            run.step(lambda piece: Outcome(error=InternalError("x")) if piece.start % 2 else run.outcome(piece))
        else:
            run.step()
        owned = sum(len(set(s.blocks)) for s in run.batch._held.values())
        assert run.pool.used <= owned
        assert (run.pool.used > 0) == (owned > 0)
    run.run()
    assert run.pool.used == 0
    finals = Counter((event.request_id, event.attempt) for event in run.events if event.finish)
    assert finals <= Counter(accepted)
    assert Counter(accepted) - finals == Counter(superseded), "only a replaced attempt ends without an event"


def ended(run: Harness, *script: GenerateRequest | int) -> list[str]:
    """The order in which requests end; those of ``script`` come with so many steps in between."""
    for part in script:
        if isinstance(part, int):
            for _ in range(part):
                run.step()
        else:
            run.add(part)
    run.run()
    return [event.request_id for event in run.events if event.finish]


def test_preemption_takes_the_last_admitted_who_goes_on_before_what_waits() -> None:
    run = Harness(blocks=6, seqs=2, cache=False)
    assert ended(run, *(endless(name, [1, 2, 3], 6) for name in "abc")) == ["a", "b", "c"]
    assert run.batch.counters.preemptions > 0
    computed = Counter(p.state.request.id for plan in run.plans for p in pieces(plan) if p.start == 0)
    assert computed["b"] > computed["a"] == computed["c"] == 1


def test_higher_priority_is_admitted_first() -> None:
    prompts = [ask(name, [1, 2], 4, priority=priority) for name, priority in (("low", 9), ("high", 0), ("mid", 5))]
    assert ended(Harness(seqs=1), *prompts) == ["high", "mid", "low"]


def test_blocks_are_taken_from_the_lowest_priority_first() -> None:
    run = Harness(blocks=6, cache=False)
    script = (endless("low", [1, 2, 3], 6, priority=9), 1, endless("high", [1, 2, 3], 6, priority=0))
    assert ended(run, *script) == ["high", "low"]
    assert run.batch.counters.preemptions > 0


def test_an_admission_leaves_the_running_room_to_grow() -> None:
    run = Harness(blocks=4, cache=False)
    assert ended(run, endless("running", [1, 2], 4), 1, endless("next", [1, 2, 3, 1], 4)) == ["running", "next"]
    assert run.batch.counters.preemptions == 0


def test_a_scored_prompt_preempted_between_two_chunks_is_scored_once() -> None:
    run = Harness(blocks=7, budget=3)
    run.add(endless("running", [1, 2], 8, priority=0))
    run.step()
    run.add(ask("scored", [3, 2, 1, 3, 2, 1, 3, 2], 1, prompt_logprobs=0))
    while run.batch.counters.prefill_chunks < 2:
        run.step()
    assert run.batch._running[-1].request.id == "scored"
    run.batch._preempt(run.batch._running[-1])
    run.run()
    (event,) = [e for e in run.events if e.request_id == "scored"]
    assert event.prompt_logprobs == [None, *(TokenLogprob(-float(p)) for p in range(1, 8))]


def test_a_prompt_preempted_between_two_chunks_keeps_what_was_computed_and_no_more() -> None:
    run, asked = Harness(blocks=16, budget=4), endless("r", [1, 2, 3, 1, 2, 3, 1, 2], 2)
    run.add(asked)
    run.step()
    run.batch._preempt(run.batch._running[0])
    assert (run.pool.used, run.pool.cached) == (0, 2)
    piece = pieces(run.step())[0]
    assert (piece.start, piece.length) == (4, 4)
    run.run()
    assert run.tokens("r") == expected(asked)
    assert [e.cached_tokens for e in run.events] == [0, 0], "its own leftovers are no hit that a client should see"


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    run = Harness(blocks=16)
    run.add(endless("first", [1, 2, 3], 6))
    run.run()
    run.add(endless("second", [1, 2, 3, *run.tokens("first"), 1], 2))
    run.run()
    assert [e.cached_tokens for e in run.events if e.request_id == "second"] == [8, 0]


def test_the_attempt_that_is_held_already_is_not_started_again() -> None:
    run = Harness()
    run.add(endless("r", [1, 2, 3], 4))
    run.step()
    run.add(endless("r", [1, 2, 3], 4))
    run.run()
    assert [event.index for event in run.events] == [0, 1, 2, 3]


def test_scores_of_a_prompt_come_piece_by_piece_before_its_first_token() -> None:
    run = Harness(blocks=16, budget=3)
    run.add(ask("r", [1, 2, 3, 1, 2, 3, 1], 1, prompt_logprobs=0, wire=2))
    run.run()
    assert [(e.scores and (e.scores.start, len(e.scores)), e.finish) for e in run.events] == [
        ((1, 3), None),
        ((4, 3), None),
        (None, "length"),
    ]


@pytest.mark.parametrize("wire", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_of_one_token_has_no_score(wire: int, max_tokens: int) -> None:
    run = Harness(blocks=16)
    run.add(ask("r", [1], max_tokens, prompt_logprobs=0, wire=wire))
    run.run()
    (event,) = run.events
    assert event.finish is not None
    assert event.prompt_logprobs == ([None] if wire == 1 else None)


def test_decodes_come_first_and_a_long_prompt_is_cut_into_chunks() -> None:
    run = Harness(blocks=32, budget=4)
    run.add(endless("decoding", [1, 2], 8))
    run.step()
    run.add(ask("long", [1] * 10, 1))
    shapes = []
    while run.batch.has_work:
        shapes.append([(p.state.request.id, p.length) for p in pieces(run.step())])
    assert shapes[:4] == [[("decoding", 1), ("long", 3)]] * 3 + [[("decoding", 1), ("long", 1)]]
    assert run.batch.counters.prefill_chunks == 3


@pytest.mark.parametrize(("cache", "scored"), [(False, None), (True, 0)])
def test_the_prefix_cache_is_bypassed_when_off_or_when_the_prompt_is_scored(cache: bool, scored: int | None) -> None:
    run = Harness(blocks=16, cache=cache)
    for name in "ab":
        run.add(ask(name, [1, 2, 3, 1], 1, prompt_logprobs=scored))
        run.run()
    assert [pieces(plan)[0].length for plan in run.plans] == [4, 4]
    assert run.pool.query_tokens == 0


def test_a_resumed_attempt_with_nothing_left_ends_at_once() -> None:
    run = Harness()
    run.add(ask("r", [1, 2], 2, attempt=2, delivered=(3, 4)))
    run.run()
    (event,) = run.events
    assert (event.index, event.token_id, event.finish) == (2, None, "length")


def test_what_waits_for_a_place_is_held_but_in_no_step() -> None:
    run = Harness(seqs=1)
    run.add(*(endless(name, [1, 2, 3], 9) for name in ("first", "second")))
    run.step()
    assert (run.batch.held(), run.batch.in_step()) == ({"first": 1, "second": 1}, {"first": 1})


def of_tenant(tenant: str, count: int, prompt: list[int], max_tokens: int = 1) -> list[GenerateRequest]:
    return [endless(f"{tenant}{number}", prompt, max_tokens, tenant=tenant) for number in range(count)]


TURNS: dict[str, tuple[list[GenerateRequest | int], str]] = {
    "another tenant waits for one of many long prompts": (
        [*of_tenant("a", 4, [1, 2, 3, 4, 5, 6]), 1, *of_tenant("b", 3, [7, 8, 9])],
        "a0 b0 b1 a1 b2 a2 a3",
    ),
    "long answers are charged, or one with long prompts would always be passed": (
        [*of_tenant("a", 3, [1, 2, 3, 4, 5, 6, 7, 8]), *of_tenant("b", 3, [9], 12)],
        "a0 b0 a1 b1 a2 b2",
    ),
    "one who comes back has saved no turns up": (
        [*of_tenant("a", 6, [1, 2, 3, 4]), 4, *of_tenant("b", 3, [5, 6, 7, 8])],
        "a0 a1 a2 a3 b0 a4 b1 a5 b2",
    ),
}


@pytest.mark.parametrize(("script", "order"), TURNS.values(), ids=TURNS)
def test_tenants_take_turns(script: list[GenerateRequest | int], order: str) -> None:
    assert ended(Harness(seqs=1), *script) == order.split()


def test_what_a_tenant_took_back_while_it_waited_is_not_charged() -> None:
    run = Harness(seqs=1)
    run.add(ask("first", [1, 2], 1, tenant="a"))
    for gone in of_tenant("b", 3, [1, 2, 3, 4]):
        run.add(gone)
        run.batch.cancel(gone.id, 1)
    assert ended(run, ask("a", [1, 2], 1, tenant="a"), ask("b", [3, 4], 1, tenant="b"))[-3:] == ["first", "b", "a"]


def test_counters_of_tenants_who_left_are_forgotten() -> None:
    run = Harness(seqs=1)
    for number in range(3000):
        run.add(ask("r", [1, 2], 1, tenant=f"t{number}"))
        run.run()
    assert len(run.batch._waiting._given) <= 1025


def test_half_of_a_scored_prompt_is_not_sent() -> None:
    run = Harness(budget=3)
    run.add(ask("r", [1, 2, 3, 1, 2], 4, prompt_logprobs=0))
    run.step()
    run.batch.cancel("r", 1)
    run.run()
    assert [(e.finish, e.prompt_logprobs) for e in run.events] == [("cancelled", None)]


def test_deadlines_end_running_and_waiting_requests() -> None:
    run = Harness(blocks=16, seqs=1)
    run.add(
        endless("running", [1], 20, deadline_ms=50, priority=0),
        endless("waiting", [1], 20, deadline_ms=50),
        endless("later", [1], 2, deadline_ms=90),
    )
    run.step()
    run.now = 50
    run.run()
    assert [run.end(name).error.code for name in ("running", "waiting")] == ["deadline_exceeded"] * 2  # type: ignore[union-attr]
    assert len(run.tokens("running")) == 1
    assert run.end("later").finish == "length"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (ask("r", [], 1), "invalid_request"),
        (ask("r", [VOCAB], 1), "invalid_request"),
        (ask("r", [-1], 1), "invalid_request"),
        (ask("r", [1], 1, logit_bias={VOCAB: 1.0}), "invalid_request"),
        (ask("r", [1] * 4, 7), "context_length_exceeded"),
        (ask("r", [1] * 4, 5), "context_length_exceeded"),
    ],
)
def test_what_can_never_run_is_refused_and_the_others_are_untouched(asked: GenerateRequest, code: str) -> None:
    run = Harness(blocks=4, max_model_len=10)
    run.add(endless("other", [1], 2), asked)
    run.run()
    error = run.end("r").error
    assert error is not None
    assert error.code == code
    assert len(run.tokens("other")) == 2


def test_a_failed_piece_ends_alone_and_its_blocks_are_forgotten() -> None:
    run, good = Harness(blocks=16), endless("good", [1, 2, 3, 2], 3)
    run.add(good, endless("bad", [1, 2, 3, 1], 3))
    blocks: list[int] = []

    def outcome(piece: Piece) -> Outcome:
        if piece.state.request.id != "bad":
            return run.outcome(piece)
        blocks.extend(piece.state.blocks)
        return Outcome(error=InternalError("x"))

    run.step(outcome)
    assert sorted(run.zeroed) == sorted(blocks)
    run.run()
    assert run.end("bad").error is not None
    assert run.tokens("good") == expected(good)


def test_a_request_that_comes_while_others_only_decode_starts_with_the_next_step() -> None:
    run = Harness(blocks=20, block_size=4, seqs=3)
    run.add(*(asked := [endless(name, [1, 2], 12) for name in "ab"]))
    for _ in range(3):
        run.step()
    run.add(endless("c", [3, 4], 2))
    for _ in range(2):
        assert [piece.state.request.id for piece in pieces(run.step())] == ["a", "b", "c"]
    run.batch.cancel("a", 1)
    assert [piece.state.request.id for piece in pieces(run.step())] == ["b"]
    run.run()
    assert run.tokens("b") == expected(asked[1])


def test_waits_and_prefills_are_timed_once_for_each_sequence() -> None:
    bench = Harness(budget=4, seqs=1, blocks=16)
    bench.add(ask("a", [1, 2, 3, 4, 5, 6], 2, ignore_eos=True), ask("b", [1, 2], 1, ignore_eos=True))
    for _ in range(2):
        bench.seconds += 10  # the first step of "a" is planned at 11, the second has its last chunk and its first token
        bench.step()
    assert (list(bench.batch.waits), list(bench.batch.prefills)) == ([10.0], [10.0])
    bench.seconds += 5
    bench.run()
    assert (list(bench.batch.waits), list(bench.batch.prefills)) == ([10.0, 25.0], [10.0, 0.0])


def test_a_preempted_sequence_does_not_wait_a_second_time() -> None:
    bench = Harness(blocks=4, block_size=2, seqs=2, cache=False)
    bench.add(ask("a", [1, 2, 3], 4, ignore_eos=True), ask("b", [1, 2], 5, ignore_eos=True))
    bench.run()
    assert bench.batch.counters.preemptions > 0
    assert (len(bench.batch.waits), len(bench.batch.prefills)) == (2, 2)
