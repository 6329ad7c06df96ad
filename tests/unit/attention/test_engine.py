"""The engine against the oracle, token for token, and what happens when something in a step breaks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from testkit.models.engines import MakeEngine, ask, run, tokens
from testkit.queue.scores import prompt_scores
from torch import Tensor

from services.attention.step.engine import Engine
from services.errors import ConfigError, ExpertUnavailable
from services.fabric.local import LocalHandle, LocalLink
from services.messages import GenerateRequest, TokenEvent
from services.model.dense import DenseModel

SHARED = [5, 9, 33, 7, 21, 60, 44, 13, 2, 90, 17]
NAN, FATAL = 96, 95
"""Tokens that the model ``touchy`` computes as NaN, and cannot compute."""


@pytest.fixture(scope="module")
def workload(tiny: Any) -> dict[str, tuple[GenerateRequest, list[int]]]:
    """Requests of mixed lengths, half of them with a common prefix, and what the oracle answers."""
    draw = random.Random(3)
    wanted = {}
    for number in range(12):
        own = [draw.randrange(1, 94) for _ in range(draw.choice([1, 2, 5, 9, 17, 30, 45]))]
        prompt = SHARED + own if number % 2 else own
        max_tokens = draw.choice([1, 6, 20, 24])
        wanted[f"r{number}"] = (ask(f"r{number}", prompt, max_tokens), tiny.greedy(prompt, max_tokens))
    assert len({token for _, answer in wanted.values() for token in answer}) > 30, "the model is too dull to test with"
    return wanted


CROWDED = {"kv_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    "crowded": CROWDED,
    "crowded, nothing cached": {**CROWDED, "prefix_cache": False},
    "blocks of one token": {"block_size": 1, "kv_blocks": 80, "max_num_seqs": 64},
    "one token a step": {"block_size": 16, "kv_blocks": 5, "max_num_batched_tokens": 1},
    "fewer tokens than sequences": {"block_size": 3, "kv_blocks": 40, "max_num_batched_tokens": 3, "max_num_seqs": 12},
    "one sequence": {"block_size": 64, "kv_blocks": 2, "max_num_seqs": 1},
}
"""The longest request takes 80 tokens, in the last four all that the blocks hold (or nearly)."""


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_equals_the_oracle_whatever_the_batch_does(
    make_engine: MakeEngine, workload: dict[str, tuple[GenerateRequest, list[int]]], name: str
) -> None:
    engine = make_engine(**OPTIONS[name])
    events = run(engine, *(request for request, _ in workload.values()))
    assert {name: tokens(of_one) for name, of_one in events.items()} == {n: want for n, (_, want) in workload.items()}
    stats = engine.stats()
    assert stats.decode_tokens == sum(len(want) for _, want in workload.values())
    if name.startswith("crowded"):
        assert stats.preemptions > 0
        assert stats.prefill_chunks > 0
        assert (stats.prefix_hit_tokens > 0) == (name == "crowded")


def test_a_full_prefix_hit_recomputes_the_last_token_and_changes_nothing(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    prompt = SHARED[:8]
    first, second = (run(engine, ask(name, prompt))[name] for name in ("first", "second"))
    assert tokens(first) == tokens(second) == tiny.greedy(prompt, 8)
    assert [event.cached_tokens for event in second[:2]] == [4, 0]
    assert (engine.stats().prefix_query_tokens, engine.stats().prefix_hit_tokens) == (16, 4)


def _cached(engine: Engine[LocalHandle], prompt: list[int], **owner: str) -> int:
    """Number of cached tokens that a request of ``owner`` reports."""
    return max(event.cached_tokens for event in run(engine, ask("r", prompt, **owner))["r"])


def test_nobody_learns_what_another_tenant_asked(make_engine: MakeEngine, tiny: Any) -> None:
    """An attack: 4 tokens are known, the next 4 are guessed, and usage reports how far the cache went."""
    known, secret, wrong, end = SHARED[:4], SHARED[4:8], [50, 51, 52, 53], [8, 9]
    whole = known + secret + end
    everybody = make_engine(prefix_cache_scope="all")
    _cached(everybody, whole, tenant="alice")
    cached = [_cached(everybody, known + guess + end, tenant="bob") for guess in (wrong, secret)]
    assert cached == [4, 8], "or this test shows nothing"
    engine = make_engine()
    _cached(engine, whole, tenant="alice")
    for tenant, guesses in (("bob", (wrong, secret)), ("eve", (secret, wrong))):
        cached = [_cached(engine, known + guess + end, tenant=tenant) for guess in guesses]
        assert cached == [0, 4], "of what the tenant asked before, and right or wrong alike"
    assert _cached(engine, whole, tenant="alice") == 8
    assert tokens(run(engine, ask("last", whole, tenant="bob"))["last"]) == tiny.greedy(whole, 8)


@pytest.mark.parametrize("scope", ["tenant", "all"])
def test_a_salt_shares_with_its_like_alone(make_engine: MakeEngine, scope: str) -> None:
    engine = make_engine(prefix_cache_scope=scope)
    assert [_cached(engine, SHARED, cache_salt=salt) for salt in ("", "a", "b", "a", "")] == [0, 0, 0, 8, 8]


SAMPLED: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "seed": 77, "max_tokens": 24, "ignore_eos": True}


def test_a_seeded_draw_does_not_depend_on_the_batch(make_engine: MakeEngine) -> None:
    wanted = tokens(run(make_engine(), ask("r", SHARED, **SAMPLED))["r"])
    crowded = make_engine(**CROWDED)
    others = [ask(f"n{n}", [n + 1] * 9, 30, temperature=1.0, seed=n, ignore_eos=True) for n in range(5)]
    assert tokens(run(crowded, *others, ask("r", SHARED, **SAMPLED))["r"]) == wanted
    assert crowded.stats().preemptions > 0
    assert len(set(wanted)) > 5


@pytest.mark.parametrize("delivered", [1, 7, 23])
def test_a_resumed_attempt_draws_what_the_first_would_have(make_engine: MakeEngine, delivered: int) -> None:
    asked = {**SAMPLED, "frequency_penalty": 0.5, "logprobs": 1}
    whole = run(make_engine(), ask("r", SHARED, **asked))["r"]
    resumed = ask("r", SHARED, attempt=2, delivered=tokens(whole)[:delivered], **asked)
    rest = run(make_engine(max_num_batched_tokens=5), resumed)["r"]
    assert [event.index for event in rest] == list(range(delivered, 24))
    assert tokens(rest) == tokens(whole)[delivered:]
    for again, before in zip(rest, whole[delivered:], strict=True):
        assert again.logprob is not None
        assert before.logprob is not None
        assert again.logprob.logprob == pytest.approx(before.logprob.logprob, abs=1e-5)


@pytest.mark.parametrize("wire", [1, 2])
@pytest.mark.parametrize("budget", [5, 64])
def test_prompt_scores_equal_the_oracles(make_engine: MakeEngine, tiny: Any, budget: int, wire: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    run(engine, ask("warm", SHARED))
    events = run(engine, ask("r", SHARED, 1, prompt_logprobs=2, logprobs=2, wire=wire))["r"]
    event, scores = events[-1], prompt_scores(events)
    logprobs_TV = tiny.reference.logits(SHARED).log_softmax(-1)
    assert scores[0] is None
    assert len(scores) == len(SHARED)
    for position, score in enumerate(scores[1:], start=1):
        assert score is not None
        want = logprobs_TV[position - 1]
        assert score.logprob == pytest.approx(float(want[SHARED[position]]), abs=1e-5)
        assert [token for token, _ in score.top] == want.topk(2).indices.tolist()
    assert event.logprob is not None
    assert event.logprob.logprob == pytest.approx(float(logprobs_TV[-1].max()), abs=1e-5)


def test_stop_tokens_end_a_request(make_engine: MakeEngine, tiny: Any) -> None:
    wanted = tiny.greedy(SHARED, 8)
    events = run(make_engine(), ask("stopped", SHARED, stop_token_ids=(wanted[2],)), ask("whole", SHARED))
    first = wanted.index(wanted[2]) + 1
    assert tokens(events["stopped"]) == wanted[:first]
    assert events["stopped"][-1].finish == "stop"
    assert events["whole"][-1].finish == "length"


def test_cancelling_frees_blocks_at_once_or_with_the_step_under_way(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    engine.add(ask("r", SHARED, 30))
    engine.step()
    assert engine.stats().kv_used == 3
    engine.cancel("r", 0)
    assert engine.held() == {"r": 1}, "a cancel of an earlier attempt must not touch this one"
    engine.cancel("r", 1)
    assert engine.held() == {}
    ahead = engine._steps._lookahead == "all"
    assert (engine.stats().kv_used, engine._steps.in_flight) == (3 * ahead, ahead), "the step writes to one of them"
    assert [(event.index, event.finish) for event in engine.step()] == [(1, "cancelled")]
    assert engine.stats().kv_used == 0
    assert not engine.has_work


def test_a_higher_attempt_replaces_the_lower_one(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    wanted = tiny.greedy(SHARED, 8)
    engine.add(ask("r", SHARED))
    engine.step()
    engine.add(ask("r", SHARED, attempt=2, delivered=(wanted[0],)))
    assert engine.held() == {"r": 2}
    events = run(engine)["r"]
    assert {event.attempt for event in events} == {2}
    assert tokens(events) == wanted[1:]


def error_of(events: list[TokenEvent]) -> str:
    """The code of the error that is all that came of a request."""
    (end,) = events
    assert end.error is not None
    return end.error.code


def test_a_request_with_broken_numbers_fails_alone_and_leaves_clean_blocks(
    make_engine: MakeEngine, tiny: Any, touchy: DenseModel
) -> None:
    """Its blocks go to the next request, whose padded reads must not see NaN."""
    engine = make_engine(model=touchy, kv_blocks=16, max_num_batched_tokens=8)
    events = run(engine, ask("good", SHARED), ask("bad", [NAN] * 11 + [3, 4], prompt_logprobs=0))
    assert tokens(events["good"]) == tiny.greedy(SHARED, 8)
    assert error_of(events["bad"]) == "internal_error"
    assert engine.stats().kv_cached <= 4, "what the broken request computed must not be found again"
    events = run(engine, *(ask(f"next{number}", SHARED[number:], 4, prompt_logprobs=0) for number in range(3)))
    assert [tokens(events[f"next{n}"]) for n in range(3)] == [tiny.greedy(SHARED[n:], 4) for n in range(3)]


def test_broken_numbers_are_noticed_before_a_token_is_drawn(make_engine: MakeEngine, touchy: DenseModel) -> None:
    """Otherwise a preemption or a cancel could hand blocks with NaN to the next request."""
    engine = make_engine(model=touchy, max_num_batched_tokens=8)
    engine.add(ask("bad", [NAN, *SHARED]))
    assert error_of(engine.step()) == "internal_error"
    while engine.has_work:  # a step launched ahead holds them
        engine.step()
    assert engine.stats().kv_empty == engine.stats().kv_blocks
    assert set(engine.stats().step_failures) == {"not_finite"}


def test_a_prompt_whose_scores_are_not_numbers_fails(make_engine: MakeEngine, tiny: Any) -> None:
    model = tiny.dense()
    model._weights.lm_head_VD[5] = math.nan
    events = run(make_engine(model=model), ask("r", SHARED, 0, prompt_logprobs=0))
    assert error_of(events["r"]) == "internal_error"


def test_a_step_that_raises_ends_only_the_guilty_request(
    make_engine: MakeEngine, tiny: Any, touchy: DenseModel
) -> None:
    engine = make_engine(model=touchy, max_num_batched_tokens=128)
    events = run(engine, ask("good", SHARED), ask("bad", [4, FATAL, 4]), ask("also", SHARED[1:]))
    assert tokens(events["good"]) == tiny.greedy(SHARED, 8)
    assert tokens(events["also"]) == tiny.greedy(SHARED[1:], 8)
    assert error_of(events["bad"]) == "internal_error"
    assert engine.stats().step_failures["error"] == 2, "the step, and the request that ran alone"


def test_the_engine_outlives_a_broken_model(
    make_engine: MakeEngine, tiny: Any, touchy: DenseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_token_ids_T: Tensor) -> Tensor:
        raise RuntimeError("planted")

    engine = make_engine(model=touchy)
    with monkeypatch.context() as patch:
        patch.setattr(touchy, "embed", broken)
        events = run(engine, ask("a", SHARED), ask("b", SHARED))
    assert [error_of(events[name]) for name in "ab"] == ["internal_error"] * 2
    assert tokens(run(engine, ask("c", SHARED))["c"]) == tiny.greedy(SHARED, 8)


def test_a_typed_error_of_the_link_reaches_the_requests(make_engine: MakeEngine) -> None:
    class DeadLink(LocalLink):
        def combine(self, handle: LocalHandle) -> Tensor:  # noqa: ARG002
            raise ExpertUnavailable("No replica is alive.")

    dead = DeadLink({layer: lambda x, _ids, _w: torch.zeros_like(x) for layer in range(3)}, num_experts=8)
    engine = make_engine(link=dead)
    assert error_of(run(engine, ask("r", SHARED))["r"]) == "expert_unavailable"
    assert engine.stats().step_failures == {"experts": 1}


def test_exchanges_of_every_step_are_timed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    run(engine, ask("a", SHARED, 3, ignore_eos=True))
    taken = engine.take_durations()
    assert [step.transport for step in taken.exchanges] == ["local"] * engine.stats().steps
    assert all(step.dispatch_s > 0 for step in taken.exchanges)
    assert (len(list(taken.batch_waits)), len(list(taken.prefills))) == (1, 1)
    again = engine.take_durations()
    assert [*again.exchanges, *again.batch_waits, *again.prefills] == []


def test_sizes_come_from_memory_or_from_blocks(make_engine: MakeEngine) -> None:
    bytes_per_block = 2 * 3 * 4 * 2 * 8 * 4
    engine = make_engine(kv_blocks=None, kv_memory_gib=10.5 * bytes_per_block / 2**30)
    assert engine.stats().kv_blocks == 10
    with pytest.raises(ConfigError, match="kv-memory-gib"):
        make_engine(kv_blocks=None, kv_memory_gib=bytes_per_block / 2**31)
    with pytest.raises(ConfigError, match=r"GiB.*Lower --kv-memory-gib"):
        make_engine(kv_blocks=10**12)


def test_stats_have_the_last_step_and_the_totals(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    for name in "ab":
        engine.add(ask(name, SHARED, 2, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used, stats.steps) == (1, 1, 3, 1)
    assert (stats.step_tokens, stats.prefill_tokens, stats.decode_tokens) == (11, 11, 1)
    assert stats.step_seconds > 0
    run(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used, stats.decode_tokens) == (0, 0, 0, 4)
    assert stats.kv_cached + stats.kv_empty == stats.kv_blocks
