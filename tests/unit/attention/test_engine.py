"""The engine against the oracle, token for token, and what happens when something in a step breaks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from testkit.queue.scores import prompt_scores
from torch import Tensor

from services.attention.step.engine import Engine
from services.errors import ConfigError, ExpertUnavailable
from services.fabric.local import LocalHandle, LocalLink
from services.messages import GenerateRequest, SamplingParams, TokenEvent
from services.model.dense import DenseModel

MakeEngine = Callable[..., Engine[LocalHandle]]
SHARED = [5, 9, 33, 7, 21, 60, 44, 13, 2, 90, 17]


def ask(
    name: str,
    prompt: list[int],
    *,
    attempt: int = 1,
    delivered: tuple[int, ...] = (),
    wire: int = 1,
    **sampling: Any,
) -> GenerateRequest:
    """A request, greedy unless ``sampling`` says otherwise; ``delivered`` tokens came from earlier attempts."""
    return GenerateRequest(
        id=name,
        attempt=attempt,
        token_ids=[*prompt, *delivered],
        prompt_len=len(prompt),
        sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
        deadline_ms=10**12,
        priority=5,
        tenant="t",
        reply_to="g",
        wire=wire,
    )


def run(engine: Engine[LocalHandle], limit: int = 3000) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left; events by request."""
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        limit -= 1
        assert limit
    assert engine.stats().kv_used == 0
    assert all(sum(event.finish is not None for event in of_one) == 1 for of_one in events.values())
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


@pytest.fixture(scope="module")
def workload(tiny: Any) -> dict[str, tuple[GenerateRequest, list[int]]]:
    """Requests of mixed lengths, half of them with a common prefix, and what the oracle answers."""
    draw = random.Random(3)
    wanted = {}
    for number in range(12):
        own = [draw.randrange(1, 94) for _ in range(draw.choice([1, 2, 5, 9, 17, 30, 45]))]
        prompt = SHARED + own if number % 2 else own
        max_tokens = draw.choice([1, 6, 20, 24])
        request = ask(f"r{number}", prompt, max_tokens=max_tokens)
        wanted[request.id] = (request, tiny.greedy(prompt, max_tokens))
    assert len({token for _, answer in wanted.values() for token in answer}) > 30, "the model is too dull to test with"
    return wanted


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_equals_the_oracle_whatever_the_batch_does(
    make_engine: MakeEngine, workload: dict[str, tuple[GenerateRequest, list[int]]], cache: bool
) -> None:
    engine = make_engine(kv_blocks=24, max_num_seqs=6, max_num_batched_tokens=16, prefix_cache=cache)
    for request, _ in workload.values():
        engine.add(request)
    events = run(engine)
    assert {name: tokens(of_one) for name, of_one in events.items()} == {n: want for n, (_, want) in workload.items()}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefill_chunks > 0
    assert (stats.prefix_hit_tokens > 0) == cache
    assert stats.decode_tokens == sum(len(want) for _, want in workload.values())


TIGHT: dict[str, dict[str, Any]] = {
    "blocks of one token": {"block_size": 1, "kv_blocks": 80, "max_num_seqs": 64},
    "one token a step": {"block_size": 16, "kv_blocks": 5, "max_num_batched_tokens": 1},
    "fewer tokens than sequences": {"block_size": 3, "kv_blocks": 40, "max_num_batched_tokens": 3, "max_num_seqs": 12},
    "one sequence": {"block_size": 64, "kv_blocks": 2, "max_num_seqs": 1},
}


@pytest.mark.parametrize("options", TIGHT.values(), ids=TIGHT)
def test_greedy_equals_the_oracle_with_the_least_of_everything(
    make_engine: MakeEngine, workload: dict[str, tuple[GenerateRequest, list[int]]], options: dict[str, Any]
) -> None:
    """The longest request takes 80 tokens, all that the blocks hold (or nearly)."""
    engine = make_engine(**options)
    for request, _ in workload.values():
        engine.add(request)
    events = run(engine)
    assert {name: tokens(of_one) for name, of_one in events.items()} == {n: want for n, (_, want) in workload.items()}


def test_a_full_prefix_hit_recomputes_the_last_token_and_changes_nothing(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine()
    prompt = SHARED[:8]
    engine.add(ask("first", prompt))
    first = run(engine)["first"]
    engine.add(ask("second", prompt))
    second = run(engine)["second"]
    assert tokens(first) == tokens(second) == tiny.greedy(prompt, 8)
    assert [event.cached_tokens for event in second[:2]] == [4, 0]


def _cached(engine: Engine[LocalHandle], name: str, prompt: list[int], *, tenant: str, salt: str = "") -> int:
    """Number of cached tokens that a request of ``tenant`` reports."""
    engine.add(msgspec.structs.replace(ask(name, prompt), tenant=tenant, cache_salt=salt))
    return max(event.cached_tokens for event in run(engine)[name])


def test_nobody_learns_what_another_tenant_asked(make_engine: MakeEngine, tiny: Any) -> None:
    """An attack: 4 tokens are known, the next 4 are guessed, and usage reports how far the cache went."""
    known, secret, wrong, end = SHARED[:4], SHARED[4:8], [50, 51, 52, 53], [8, 9]
    everybody = make_engine(prefix_cache_scope="all")
    _cached(everybody, "alice", known + secret + end, tenant="alice")
    cached = [_cached(everybody, str(guess), known + guess + end, tenant="bob") for guess in (wrong, secret)]
    assert cached == [4, 8], "or this test shows nothing"
    engine = make_engine()
    _cached(engine, "alice", known + secret + end, tenant="alice")
    for tenant, guesses in (("bob", (wrong, secret)), ("eve", (secret, wrong))):
        cached = [_cached(engine, f"{tenant}-{guess}", known + guess + end, tenant=tenant) for guess in guesses]
        assert cached == [0, 4], "of what the tenant asked before, and right or wrong alike"
    assert _cached(engine, "again", known + secret + end, tenant="alice") == 8
    assert tokens(_answer(engine, "last", known + secret + end)) == tiny.greedy(known + secret + end, 8)


def _answer(engine: Engine[LocalHandle], name: str, prompt: list[int]) -> list[TokenEvent]:
    engine.add(msgspec.structs.replace(ask(name, prompt), tenant="bob"))
    return run(engine)[name]


@pytest.mark.parametrize("scope", ["tenant", "all"])
def test_a_salt_shares_with_its_like_alone(make_engine: MakeEngine, scope: str) -> None:
    engine = make_engine(prefix_cache_scope=scope)
    cached = [_cached(engine, str(n), SHARED, tenant="t", salt=salt) for n, salt in enumerate(["", "a", "b", "a", ""])]
    assert cached == [0, 0, 0, 8, 8]


SAMPLED: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "seed": 77, "max_tokens": 24, "ignore_eos": True}


def test_a_seeded_draw_does_not_depend_on_the_batch(make_engine: MakeEngine) -> None:
    alone = make_engine()
    alone.add(ask("r", SHARED, **SAMPLED))
    wanted = tokens(run(alone)["r"])
    crowded = make_engine(kv_blocks=24, max_num_seqs=6, max_num_batched_tokens=16)
    for number in range(5):
        crowded.add(ask(f"n{number}", [number + 1] * 9, max_tokens=30, temperature=1.0, seed=number, ignore_eos=True))
    crowded.add(ask("r", SHARED, **SAMPLED))
    assert tokens(run(crowded)["r"]) == wanted
    assert crowded.stats().preemptions > 0
    assert len(set(wanted)) > 5


def test_another_seed_or_choice_draws_other_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for name, changed in {"a": {}, "b": {"seed": 78}, "c": {"choice": 1}}.items():
        engine.add(ask(name, SHARED, **{**SAMPLED, **changed}))
    events = run(engine)
    assert len({tuple(tokens(of_one)) for of_one in events.values()}) == 3


@pytest.mark.parametrize("delivered", [1, 7, 23])
def test_a_resumed_attempt_draws_what_the_first_would_have(make_engine: MakeEngine, delivered: int) -> None:
    engine = make_engine()
    engine.add(ask("r", SHARED, frequency_penalty=0.5, logprobs=1, **SAMPLED))
    whole = run(engine)["r"]
    other = make_engine(max_num_batched_tokens=5)
    head = tuple(tokens(whole)[:delivered])
    other.add(ask("r", SHARED, attempt=2, delivered=head, frequency_penalty=0.5, logprobs=1, **SAMPLED))
    rest = run(other)["r"]
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
    engine.add(ask("warm", SHARED))
    run(engine)
    engine.add(ask("r", SHARED, prompt_logprobs=2, logprobs=2, max_tokens=1, wire=wire))
    events = run(engine)["r"]
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


def test_stop_tokens_end_a_request_and_eos_can_be_ignored(make_engine: MakeEngine, tiny: Any) -> None:
    wanted = tiny.greedy(SHARED, 8)
    engine = make_engine()
    engine.add(ask("stopped", SHARED, stop_token_ids=(wanted[2],)))
    engine.add(ask("whole", SHARED))
    events = run(engine)
    first = wanted.index(wanted[2]) + 1
    assert tokens(events["stopped"]) == wanted[:first]
    assert events["stopped"][-1].finish == "stop"
    assert events["whole"][-1].finish == "length"


def test_cancelling_frees_blocks_at_once_or_with_the_step_under_way(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    engine.add(ask("r", SHARED, max_tokens=30))
    engine.step()
    assert engine.stats().kv_used > 0
    assert engine.held() == {"r": 1}
    engine.cancel("r", 1)
    ahead = engine._steps._lookahead == "all"
    assert (engine.stats().kv_used > 0, engine._steps.in_flight) == (ahead, ahead)
    assert [event.finish for event in engine.step()] == ["cancelled"]
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


def test_a_request_with_broken_numbers_fails_alone_and_leaves_clean_blocks(make_engine: MakeEngine, tiny: Any) -> None:
    """Token 96 is NaN. Its request's blocks go to the next request, whose padded reads must not see NaN."""
    model = tiny.dense()
    model._weights.embed_VD[96] = math.nan
    engine = make_engine(model=model, kv_blocks=16, max_num_batched_tokens=8)
    wanted = tiny.greedy(SHARED, 8)
    engine.add(ask("good", SHARED))
    engine.add(ask("bad", [96] * 11 + [3, 4], prompt_logprobs=0))
    events = run(engine)
    assert tokens(events["good"]) == wanted
    (end,) = events["bad"]
    assert end.error is not None
    assert end.error.code == "internal_error"
    assert engine.stats().kv_cached <= 4, "what the broken request computed must not be found again"
    for number in range(3):
        engine.add(ask(f"next{number}", SHARED[number:], max_tokens=4, prompt_logprobs=0))
    events = run(engine)
    assert [tokens(events[f"next{n}"]) for n in range(3)] == [tiny.greedy(SHARED[n:], 4) for n in range(3)]


def test_broken_numbers_are_noticed_before_a_token_is_drawn(make_engine: MakeEngine, tiny: Any) -> None:
    """Otherwise a preemption or a cancel could hand blocks with NaN to the next request."""
    model = tiny.dense()
    model._weights.embed_VD[96] = math.nan
    engine = make_engine(model=model, max_num_batched_tokens=8)
    engine.add(ask("bad", [96, *SHARED]))
    (event,) = engine.step()
    assert event.error is not None
    assert engine.stats().kv_empty == engine.stats().kv_blocks


def test_a_prompt_whose_scores_are_not_numbers_fails(make_engine: MakeEngine, tiny: Any) -> None:
    model = tiny.dense()
    model._weights.lm_head_VD[5] = math.nan
    engine = make_engine(model=model)
    engine.add(ask("r", SHARED, max_tokens=0, prompt_logprobs=0))
    (event,) = run(engine)["r"]
    assert event.error is not None
    assert event.error.code == "internal_error"


class FailingModel(DenseModel):
    """Raises while a step has the token 95 in it, or while ``broken``."""

    broken = False

    def embed(self, token_ids_T: Tensor) -> Tensor:
        if self.broken or bool((token_ids_T == 95).any()):
            raise RuntimeError("planted")
        return super().embed(token_ids_T)


def failing(tiny: Any) -> FailingModel:
    model = tiny.dense()
    return FailingModel(model.spec, model._weights)


def test_a_step_that_raises_ends_only_the_guilty_request(make_engine: MakeEngine, tiny: Any) -> None:
    engine = make_engine(model=failing(tiny), max_num_batched_tokens=128)
    wanted = tiny.greedy(SHARED, 8)
    engine.add(ask("good", SHARED))
    engine.add(ask("bad", [4, 95, 4]))
    engine.add(ask("also", SHARED[1:]))
    events = run(engine)
    assert tokens(events["good"]) == wanted
    assert tokens(events["also"]) == tiny.greedy(SHARED[1:], 8)
    (end,) = events["bad"]
    assert end.error is not None
    assert end.error.code == "internal_error"


def test_the_engine_outlives_a_broken_model(make_engine: MakeEngine, tiny: Any) -> None:
    model = failing(tiny)
    engine = make_engine(model=model)
    model.broken = True
    engine.add(ask("a", SHARED))
    engine.add(ask("b", SHARED))
    events = run(engine)
    assert [events[name][-1].error.code for name in "ab"] == ["internal_error"] * 2  # type: ignore[union-attr]
    model.broken = False
    engine.add(ask("c", SHARED))
    assert tokens(run(engine)["c"]) == tiny.greedy(SHARED, 8)


def test_a_typed_error_of_the_link_reaches_the_requests(make_engine: MakeEngine) -> None:
    class DeadLink(LocalLink):
        def combine(self, handle: LocalHandle) -> Tensor:  # noqa: ARG002
            raise ExpertUnavailable("No replica is alive.")

    dead = DeadLink({layer: lambda x, _ids, _w: torch.zeros_like(x) for layer in range(3)}, num_experts=8)
    engine = make_engine(link=dead)
    engine.add(ask("r", SHARED))
    (event,) = run(engine)["r"]
    assert event.error is not None
    assert event.error.code == "expert_unavailable"


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
    engine.add(ask("a", SHARED, max_tokens=2, ignore_eos=True))
    engine.add(ask("b", SHARED, max_tokens=2, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used, stats.steps) == (1, 1, 3, 1)
    assert (stats.step_tokens, stats.prefill_tokens, stats.decode_tokens) == (11, 11, 1)
    assert stats.step_seconds > 0
    run(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used, stats.decode_tokens) == (0, 0, 0, 4)
    assert stats.kv_cached + stats.kv_empty == stats.kv_blocks
