"""Engines with drafts against engines without: the same events of every request, whatever is drafted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.gpu.decode_bench import load
from testkit.gpu.recorded_graph import record
from testkit.models.drafting import Always, DraftingEngine, Knowing, Truth, truth_of
from testkit.models.engines import ask, run, tokens
from testkit.models.plots import FATAL, KINDS, NAN, Plot, all_finite, cramped

from services.attention.sequences.plan import Outcome, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.attention.speculation.drafting import Drafting
from services.attention.speculation.ngram import NgramSpeculator
from services.attention.step.engine import Engine, EngineOptions
from services.config.speculation import SpeculativeConfig
from services.errors import InternalError
from services.messages import TokenEvent, TokenLogprob
from services.model.products import InvariantProducts

PLAIN = [kind for kind in KINDS if "min_tokens" not in kind]
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([16, 20, 200]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seqs=st.sampled_from([2, 12, 64]),
    budget=st.sampled_from([4, 64]),
    wrong=st.sampled_from([0.0, 0.2, 0.7]),
    depth=st.sampled_from([1, 3, 8]),
    lookahead=st.sampled_from(["off", "all"]),
)
def test_every_request_gets_the_same_events(
    options_of: Callable[..., dict[str, Any]], seed: int, blocks: int, block_size: int, seqs: int, budget: int,
    wrong: float, depth: int, lookahead: str,
) -> None:  # fmt: skip
    options = cramped(blocks=blocks, block_size=block_size, max_num_seqs=seqs, budget=budget)
    plot = Plot(seed, turns=False)
    expected = plot.play(Engine(clock=lambda: 0, **options_of(**options)))
    speculator = Knowing(truth_of(expected), seed, wrong)
    engine = DraftingEngine(speculator, depth, **options_of(**options, lookahead=lookahead))
    assert plot.play(engine) == expected
    assert set(speculator.forgotten) >= set(expected)


@pytest.mark.parametrize("seed", range(12))
def test_requests_that_are_cancelled_and_replaced_leave_nothing_behind(
    options_of: Callable[..., dict[str, Any]], seed: int
) -> None:
    """Those that are not get the same events."""
    plot = Plot(seed)
    expected = plot.play(Engine(clock=lambda: 0, **options_of(kv_blocks=20)))
    speculator = Knowing(truth_of(expected), seed, 0.2)
    found = plot.play(DraftingEngine(speculator, 3, **options_of(kv_blocks=20, lookahead="all")))
    turned = {name for name, _ in plot._turns}
    for name, events in expected.items():
        if name in turned:
            known = {(index, token) for _, index, token, *_ in found[name] if token is not None}
            assert {(index, token) for _, index, token, *_ in events if token is not None} <= known
        else:
            assert found[name] == events


@pytest.mark.parametrize("seed", range(6))
def test_graphs_take_chains(options_of: Callable[..., dict[str, Any]], tiny: Any, seed: int) -> None:
    plot = Plot(seed, PLAIN, turns=False)
    options = {"model": tiny.parts.model, "max_num_batched_tokens": 24, "max_num_seqs": 24}
    expected = plot.play(Engine(clock=lambda: 0, **options_of(**options)))
    speculator = Knowing(truth_of(expected), seed, 0.0)
    engine = DraftingEngine(speculator, 3, **options_of(**options, capture=record, lookahead="replayed"))
    assert plot.play(engine) == expected
    stats = engine.stats()
    assert stats.graph_steps == stats.steps
    assert 0 < stats.accepted_tokens <= stats.draft_tokens, "but for right ones behind a stop token"


def test_what_is_known_beforehand_takes_as_many_steps_less(options_of: Callable[..., dict[str, Any]]) -> None:
    request = ask("r", [1, 2, 3], max_tokens=21, ignore_eos=True)
    said = tokens(run(Engine(clock=lambda: 0, **options_of()), request)["r"])
    engine = DraftingEngine(_Whole({"r": said}), 4, **options_of())
    assert tokens(run(engine, request)["r"]) == said
    stats = engine.stats()
    assert (stats.steps, stats.draft_chains, stats.draft_tokens, stats.accepted_tokens) == (5, 4, 16, 16)
    assert (stats.decode_tokens, stats.prefill_tokens) == (21, 3)


class _Whole(Knowing):
    """Drafts as much as it may."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth, 0, 0.0)

    def drafts(self, state: SequenceState, most: int) -> Sequence[int]:
        return self._truth.get(state.request.id, [])[state.generated :][:most]


def test_an_accepted_run_is_cut_where_the_sequence_ends(options_of: Callable[..., dict[str, Any]]) -> None:
    """The stop token is in the middle of a chain; the drafts behind it are right, too."""
    long = ask("r", [1, 2, 3], max_tokens=30, ignore_eos=True, temperature=1.2, seed=3)
    said = tokens(run(Engine(clock=lambda: 0, **options_of()), long)["r"])
    stop = next(token for at, token in enumerate(said) if at % 5 == 2 and said.index(token) == at)
    request = ask("r", [1, 2, 3], max_tokens=30, temperature=1.2, seed=3, stop_token_ids=(stop,), ignore_eos=True)
    engine = DraftingEngine(_Whole({"r": said}), 4, **options_of())
    events = run(engine, request)["r"]
    assert tokens(events) == said[: said.index(stop) + 1]
    assert [event.index for event in events] == list(range(len(events)))
    assert events[-1].finish == "stop"
    stats = engine.stats()
    assert stats.draft_chains == 1
    assert stats.accepted_tokens == len(events) - 2, "the prompt drew one, and so did the row before the drafts"


def test_a_chain_that_fails_counts_as_drafted_and_takes_none_back(
    options_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Totals only grow: Prometheus refuses others."""
    request = ask("r", [1, 2, 3], max_tokens=30, ignore_eos=True)
    said = tokens(run(Engine(clock=lambda: 0, **options_of()), request)["r"])
    engine = DraftingEngine(_Whole({"r": said}), 4, **options_of())
    engine.add(request)
    engine.step()
    monkeypatch.setattr(
        engine._steps, "_outcomes", lambda step: [Outcome(error=InternalError("lost"))] * step.plan.sequences
    )
    [event] = engine.step()
    assert event.error is not None
    stats = engine.stats()
    assert (stats.draft_chains, stats.draft_tokens, stats.accepted_tokens) == (1, 4, 0)


def test_sequences_that_end_beside_a_step_ahead_leave_no_index(options_of: Callable[..., dict[str, Any]]) -> None:
    """Stop tokens end them while the next step, which has a row of theirs, is in flight."""
    speculator, draw = NgramSpeculator(SpeculativeConfig(method="ngram", prompt_lookup_min=3)), random.Random(0)
    engine = DraftingEngine(speculator, 4, **options_of(lookahead="all", max_num_seqs=64))
    for number in range(8):
        stops = tuple(draw.sample(range(94), 14))
        prompts = [[draw.randrange(1, 94) for _ in range(30)] for _ in range(3)]
        run(
            engine,
            *[
                ask(f"r{number}-{at}", prompt, max_tokens=12, temperature=3.0, seed=at, stop_token_ids=stops)
                for at, prompt in enumerate(prompts)
            ],
        )
    assert engine.stats().steps_ahead > 0
    assert not speculator._indices


def test_only_accepted_tokens_are_found_in_the_prefix_cache(options_of: Callable[..., dict[str, Any]]) -> None:
    """Every draft is wrong, and yet what is cached afterwards is right."""
    request = ask("r", [1, 2, 3], max_tokens=24, ignore_eos=True)
    plain = Engine(clock=lambda: 0, **options_of())
    said = tokens(run(plain, request)["r"])
    engine = DraftingEngine(_Whole({"r": [(token + 1) % 90 for token in said]}), 4, **options_of())
    assert tokens(run(engine, request)["r"]) == said
    assert engine.stats().accepted_tokens == 0 < engine.stats().draft_tokens
    again = ask("s", [1, 2, 3, *said], max_tokens=5, ignore_eos=True)
    assert tokens(run(engine, again)["s"]) == tokens(run(plain, again)["s"])
    assert engine.stats().prefix_hit_tokens == plain.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("bad", [NAN, FATAL])
def test_a_rejected_draft_that_breaks_harms_nobody(options_of: Callable[..., dict[str, Any]], bad: int) -> None:
    requests = [ask(f"r{number}", [number + 1, 2, 3], max_tokens=12, ignore_eos=True) for number in range(3)]
    expected = {name: tokens(events) for name, events in run(_plain(options_of), *requests).items()}
    engine = DraftingEngine(_Whole({name: [bad] * 12 for name in expected}), 2, **options_of())
    assert {name: tokens(events) for name, events in run(engine, *requests).items()} == expected
    assert all_finite(engine)


def _plain(options_of: Callable[..., dict[str, Any]], **options: Any) -> Engine[Any]:
    return Engine(clock=lambda: 0, **options_of(**options))


def test_sixty_four_streams_at_once(options_of: Callable[..., dict[str, Any]]) -> None:
    """Greedy and sampled, with little cache, prompts in pieces and common beginnings; one draft in five is wrong."""
    requests = [
        ask(f"r{number}", _prompt(number), max_tokens=24, seed=number, **{"ignore_eos": True} | PLAIN[number % 8])
        for number in range(64)
    ]
    options = {"kv_blocks": 300, "max_num_seqs": 96, "max_num_batched_tokens": 96}
    expected = {name: tokens(events) for name, events in run(_plain(options_of, **options), *requests).items()}
    for lookahead in ("off", "all"):
        speculator = Knowing(expected, 1, 0.2)
        engine = DraftingEngine(speculator, 4, **options_of(**options, lookahead=lookahead))
        assert {name: tokens(events) for name, events in run(engine, *requests).items()} == expected
        stats = engine.stats()
        assert min(stats.preemptions, stats.prefix_hit_tokens, stats.prefill_chunks, stats.accepted_tokens) > 0


def _prompt(number: int) -> list[int]:
    draw = random.Random(number % 16)
    return [draw.randrange(1, 94) for _ in range(18)]


def test_bits_of_batch_invariant_answers_stay(tiny: Any) -> None:
    """In bfloat16, with log-probabilities; alone without drafts against a crowd with drafts."""
    parts = load(tiny.folder, torch.device("cpu"), torch.bfloat16, InvariantProducts())
    requests = [
        ask(f"r{number}", _prompt(number), max_tokens=20, seed=number, logprobs=2, ignore_eos=True, temperature=warm)
        for number, warm in enumerate([0.0, 0.9] * 6)
    ]
    alone = parts.engine(None, kv_blocks=64, block_size=4, max_num_seqs=1, prefix_cache=False)
    wanted = {each.id: _scored(run(alone, each)[each.id]) for each in requests}
    truth = {name: [token for token, _ in answer] for name, answer in wanted.items()}
    options = EngineOptions(kv_blocks=60, block_size=4, max_num_seqs=48, max_num_batched_tokens=24)
    engine = DraftingEngine(
        Knowing(truth, 1, 0.2, breaks=False), 4, model=parts.model, link=parts.link(), options=options
    )
    assert {name: _scored(events) for name, events in run(engine, *requests).items()} == wanted
    assert min(engine.stats().preemptions, engine.stats().accepted_tokens) > 0


def _scored(events: list[TokenEvent]) -> list[tuple[int | None, TokenLogprob | None]]:
    return [(event.token_id, event.logprob) for event in events]


def test_a_request_may_ask_for_no_drafts(options_of: Callable[..., dict[str, Any]]) -> None:
    engine = Engine(clock=lambda: 0, **options_of(speculative_config=NGRAM))
    run(engine, ask("r", [5, 6] * 8, max_tokens=20, ignore_eos=True, speculation="off"))
    assert engine.stats().draft_tokens == 0
    run(engine, ask("s", [5, 6] * 8, max_tokens=20, ignore_eos=True, logit_bias={5: 50.0}))
    assert engine.stats().draft_tokens > 0


def test_drafts_take_no_row_or_block_that_a_sequence_needs(options_of: Callable[..., dict[str, Any]]) -> None:
    """With as many sequences as a step may have there are no drafts; and none causes a preemption."""
    requests = [ask(f"r{number}", [5, 6, 5, 6], max_tokens=12, ignore_eos=True) for number in range(4)]
    full = Engine(clock=lambda: 0, **options_of(speculative_config=NGRAM, max_num_seqs=4))
    run(full, *requests)
    assert full.stats().draft_tokens == 0
    tight = Engine(clock=lambda: 0, **options_of(speculative_config=NGRAM, max_num_seqs=64, kv_blocks=16))
    run(tight, *requests)
    assert tight.stats().draft_tokens > 0
    assert tight.stats().preemptions == 0


class _Noting(Drafting):
    """Keeps the seconds of steps."""

    def note(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        self.seconds.append(seconds)
        super().note(plan, outcomes, seconds)

    seconds: list[float]


def test_what_the_host_does_between_two_steps_counts_and_idleness_does_not(
    options_of: Callable[..., dict[str, Any]],
) -> None:
    engine = Engine(clock=lambda: 0, **options_of(speculative_config=NGRAM))
    drafting = engine._batch._drafting = engine._steps._drafting = _Noting(_Whole({}), Always(1), engine._pool)
    drafting.seconds = []
    for name in ("r", "s"):
        engine.add(ask(name, [1, 2, 3], max_tokens=2, ignore_eos=True))
        time.sleep(0.05)
        began = time.perf_counter()
        engine.step()
        assert drafting.seconds.pop() <= time.perf_counter() - began
        time.sleep(0.05)
        engine.step()
        assert drafting.seconds.pop() >= 0.05
        assert not engine.has_work
