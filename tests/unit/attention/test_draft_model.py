"""Engines with a draft model against engines without: the same events of every request, and two caches that agree."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.gpu.decode_bench import Parts
from testkit.gpu.recorded_graph import record
from testkit.models.drafting import Knowing, Same, Truth
from testkit.models.engines import ask, run, tokens
from testkit.models.plots import KINDS, Plot, cramped
from torch import Tensor

from services.attention.draft_model.drafter import ModelDrafter
from services.attention.draft_model.speculator import ModelSpeculator
from services.attention.speculation.drafting import Drafting
from services.attention.speculation.gate import NONE, Amount, Gate
from services.attention.speculation.several import Several
from services.attention.speculation.speculator import OneByOne
from services.attention.step.engine import Engine, EngineOptions
from services.config.speculation import SpeculativeConfig
from services.messages import GenerateRequest
from services.model.dense import DenseModel
from services.model.inputs import StepInputs

MakeParts = Callable[..., dict[str, Any]]
DRAFTS = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=4)
SAMPLED = [kind for kind in KINDS if "prompt_logprobs" not in kind]


class Turned(Gate):
    """Is what the test makes it: how long chains are, and how many."""

    length, branches = 4, 1

    def amount(self, sequences: int) -> Amount:
        return Amount(self.length, self.branches) if sequences and self.length else NONE

    known_amount = amount

    def likely(self, sequences: int) -> bool:
        return self.amount(sequences) != NONE


class TwoModels(Engine[Any]):
    """With a gate of the test's. ``beside``: whose drafts are a second branch."""

    def __init__(self, draft: Parts, *, beside: OneByOne | None = None, capture: Any = None, **parts: Any) -> None:
        self.gate, self._beside = Turned(4), beside
        self.gate.branches = 1 if beside is None else 2
        options = parts["options"]
        self.drafter = ModelDrafter(draft.model, draft.link(), options, capture)
        super().__init__(clock=lambda: 0, capture=capture, drafter=self.drafter, **parts)
        self.prepare()

    def _new_drafting(self) -> Drafting | None:
        self.speculator = self.drafter.speculator()
        several = None if self._beside is None else Several([self.speculator, self._beside])
        return Drafting(several or self.speculator, self.gate, self._pool)


@pytest.fixture(scope="module")
def options_of(tiny: Any) -> MakeParts:
    def parts(*, model: DenseModel | None = None, **options: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {"block_size": 4, "kv_blocks": 200, "max_num_batched_tokens": 64, **options}
        return {"model": model or tiny.parts.model, "link": tiny.link(), "options": EngineOptions(**chosen)}

    return parts


@pytest.fixture(scope="module")
def near(tiny: Any) -> Parts:
    """A model that agrees with the tiny one at some positions."""
    parts: Parts = tiny.load()
    generator = torch.Generator().manual_seed(3)
    for layer in parts.model._weights.layers:
        for weight in (layer.qkv_OD, layer.o_DO):
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    return parts


def _prompt(number: int, length: int = 18) -> list[int]:
    draw = random.Random(number % 16)
    return [draw.randrange(1, 94) for _ in range(length)]


def _crowd(count: int = 64, **sampling: Any) -> list[GenerateRequest]:
    """Greedy and sampled; four of each prompt."""
    return [
        ask(f"r{number}", _prompt(number), max_tokens=24, seed=number, **{"ignore_eos": True} | kind | sampling)
        for number, kind in enumerate(SAMPLED * 8)
    ][:count]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([16, 20, 200]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seqs=st.sampled_from([2, 12, 64]),
    budget=st.sampled_from([4, 64]),
    lookahead=st.sampled_from(["off", "all"]),
)
def test_every_request_gets_the_same_events(
    options_of: MakeParts, touchy: DenseModel, near: Parts, seed: int, blocks: int, block_size: int, seqs: int,
    budget: int, lookahead: str,
) -> None:  # fmt: skip
    options = cramped(blocks=blocks, block_size=block_size, max_num_seqs=seqs, budget=budget)
    plot = Plot(seed, turns=False)
    expected = plot.play(Engine(clock=lambda: 0, **options_of(model=touchy, **options)))
    engine = TwoModels(near, **options_of(model=touchy, **options, lookahead=lookahead))
    assert plot.play(engine) == expected
    assert not engine.drafter.failures
    assert not _speculator(engine)._kept


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_are_cancelled_and_replaced_leave_nothing_behind(
    options_of: MakeParts, near: Parts, seed: int
) -> None:
    plot = Plot(seed)
    engine = TwoModels(near, **options_of(kv_blocks=20, lookahead="all"))
    plot.play(engine)
    assert not _speculator(engine)._kept


@pytest.mark.parametrize("kind", SAMPLED, ids=str)
def test_a_draft_model_that_is_the_target_is_always_right(
    options_of: MakeParts, tiny: Any, kind: dict[str, Any]
) -> None:
    """It draws with the same key, penalties, bans and filters at each position: sampled tokens agree, too."""
    request = ask("r", [1, 2, 3], max_tokens=21, seed=5, **{"ignore_eos": True} | kind)
    said = tokens(run(Engine(clock=lambda: 0, **options_of()), request)["r"])
    engine = TwoModels(tiny.parts, **options_of())
    assert tokens(run(engine, request)["r"]) == said
    stats = engine.stats()
    assert (stats.steps, stats.draft_tokens) == (5, 16)
    assert stats.accepted_tokens == 16


def test_sixty_four_streams_at_once(options_of: MakeParts, near: Parts) -> None:
    """With little cache, prompts in pieces and common beginnings."""
    options = {"kv_blocks": 300, "max_num_seqs": 96, "max_num_batched_tokens": 96}
    plain = Engine(clock=lambda: 0, **options_of(**options))
    expected = {name: tokens(events) for name, events in run(plain, *_crowd()).items()}
    engine = TwoModels(near, **options_of(**options))
    assert {name: tokens(events) for name, events in run(engine, *_crowd()).items()} == expected
    stats = engine.stats()
    assert min(stats.preemptions, stats.prefix_hit_tokens, stats.prefill_chunks, stats.accepted_tokens) > 0
    assert 0.1 < stats.accepted_tokens / stats.draft_tokens < 0.9


def _speculator(engine: TwoModels) -> ModelSpeculator:
    assert isinstance(engine.speculator, ModelSpeculator)
    return engine.speculator


def _agreeing_blocks(engine: TwoModels) -> tuple[int, int]:
    """Of the blocks that the pool has names for, those that the draft's cache has, which must hold the same."""
    names, draft = engine._pool._name_of, engine.drafter._kv
    covered = _speculator(engine)._coverage._name_of
    both = [block for block, name in names.items() if covered.get(block) == name]
    for ours, theirs in zip(engine._kv._layers, draft._layers, strict=True):
        torch.testing.assert_close(ours[:, both], theirs[:, both], atol=1e-4, rtol=1e-4)
    assert torch.equal(engine._kv.token_ids_S.view(-1, 4)[both], draft.token_ids_S.view(-1, 4)[both])
    return len(both), len(names)


def test_a_named_block_is_computed_in_both_caches(options_of: MakeParts, tiny: Any) -> None:
    """The same model twice, so that both caches have to hold the same: preempted, chunked, with common prefixes."""
    options = {"kv_blocks": 200, "max_num_seqs": 96, "max_num_batched_tokens": 96}
    engine = TwoModels(tiny.parts, **options_of(**options))
    run(engine, *_crowd())
    stats = engine.stats()
    assert min(stats.preemptions, stats.prefix_hit_tokens, stats.prefill_chunks) > 0
    both, named = _agreeing_blocks(engine)
    assert both > 0.8 * named > 0, "all but the ends of answers, behind which nothing was drafted"
    hits = stats.prefix_hit_tokens
    again = ask("again", _prompt(0), max_tokens=2, ignore_eos=True)
    engine.add(again)
    engine.step()
    assert engine.stats().prefix_hit_tokens == hits + 16
    [kept] = _speculator(engine)._kept.values()
    assert (kept.computed, _speculator(engine)._coverage.tokens(*_speculator(engine)._kept)) == (18, 16)


def test_the_cache_holds_what_the_draft_model_computes_of_its_blocks_names(options_of: MakeParts, near: Parts) -> None:
    """Of drafts that were accepted, too, behind others that were not, in blocks that belonged to others before: an
    engine that serves the draft model by itself finds the same."""
    engine = TwoModels(near, **options_of(kv_blocks=90, max_num_seqs=40, max_num_batched_tokens=96))
    asked = _crowd(24)
    said = {name: tokens(events) for name, events in run(engine, *asked).items()}
    assert min(engine.stats().preemptions, engine.stats().accepted_tokens) > 0
    _holds_what_it_computes(engine, near, asked, said, options_of)


def _holds_what_it_computes(
    engine: TwoModels, near: Parts, asked: list[GenerateRequest], said: Truth, options_of: MakeParts
) -> None:
    alone = Engine(clock=lambda: 0, **options_of(model=near.model, kv_blocks=400) | {"link": near.link()})
    run(alone, *[ask(one.id, [*one.token_ids, *said[one.id], 1], max_tokens=1) for one in asked])
    covered, found = _speculator(engine)._coverage._name_of, alone._pool._block_of
    both = [(block, found[name]) for block, name in covered.items() if name in found]
    assert len(both) > 0.7 * len(covered) > 40
    ours, theirs = map(list, zip(*both, strict=True))
    for drafts, served in zip(engine.drafter._kv._layers, alone._kv._layers, strict=True):
        torch.testing.assert_close(drafts[:, ours], served[:, theirs], atol=1e-4, rtol=1e-4)


def test_what_was_accepted_on_another_branch_is_computed_by_the_draft_model_itself(
    options_of: MakeParts, near: Parts
) -> None:
    options, asked = {"kv_blocks": 90, "max_num_seqs": 64, "max_num_batched_tokens": 96}, _crowd(24)
    plain = Engine(clock=lambda: 0, **options_of(**options))
    said = {name: tokens(events) for name, events in run(plain, *asked).items()}
    by_model = TwoModels(near, **options_of(**options))
    run(by_model, *asked)
    engine = TwoModels(near, beside=Knowing(said, 1, 0.2, breaks=False), **options_of(**options))
    assert {name: tokens(events) for name, events in run(engine, *asked).items()} == said
    stats = engine.stats()
    assert (
        stats.accepted_tokens / stats.draft_chains
        > 1.2 * by_model.stats().accepted_tokens / by_model.stats().draft_chains
    )
    assert stats.preemptions > 0
    _holds_what_it_computes(engine, near, asked, said, options_of)


def test_nothing_is_guessed_in_blocks_that_went_back_with_their_tree(options_of: MakeParts, near: Parts) -> None:
    """Another sequence may write there before this one has the same tokens in other blocks."""
    engine, looked = TwoModels(near, beside=Same([[90, 91, 92, 93]]), **options_of()), 0
    for number in range(8):
        engine.add(ask(f"r{number}", _prompt(number), max_tokens=24, ignore_eos=True))
    while engine.has_work:
        engine.step()
        for state, kept in _speculator(engine)._kept.items():
            assert kept.computed + len(kept.guessed) <= 4 * len(state.blocks)
            looked += 1
    assert looked > 50


def test_what_followed_earlier_is_the_second_branch(options_of: MakeParts, near: Parts) -> None:
    """Of a draft model with branches, as it is configured."""
    request = ask("r", range(1, 94), max_tokens=12, ignore_eos=True)
    said = tokens(run(Engine(clock=lambda: 0, **options_of()), request)["r"])
    for branches in ({}, {"num_branches": 2, "prompt_lookup_min": 1}):
        config = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=1, **branches)
        parts = options_of(speculative_config=config)
        drafter = ModelDrafter(near.model, near.link(), parts["options"])
        engine = Engine(clock=lambda: 0, drafter=drafter, **parts)
        assert tokens(run(engine, request)["r"]) == said
        assert drafter._kv.token_ids_S.any(), "the draft model took part"
        wide = engine.stats().draft_tokens > engine.stats().draft_chains > 0
        assert wide == bool(branches), "a chain has one draft"


def test_a_block_that_drafts_were_written_into_has_no_name(options_of: MakeParts, near: Parts) -> None:
    """Nor the one that it had when it belonged to another sequence: the same tokens may come to lie there again."""
    engine = TwoModels(near, **options_of(kv_blocks=90, max_num_seqs=40, max_num_batched_tokens=96))
    for request in _crowd(24):
        engine.add(request)
    looked = 0
    while engine.has_work:
        engine.step()
        named = _speculator(engine)._coverage._name_of
        for state, kept in _speculator(engine)._kept.items():
            written = state.blocks[kept.computed // 4 : -(-(kept.computed + len(kept.guessed)) // 4)]
            assert not named.keys() & set(written)
            looked += len(written)
    assert looked > 100


def test_a_token_is_computed_once_but_for_the_last_draft(options_of: MakeParts, tiny: Any) -> None:
    """The prompt beside the target; then a row for each draft, and one more for the last of four that was accepted."""
    engine = TwoModels(tiny.parts, **options_of())
    forward, rows = _speculator(engine)._forward, list[int]()

    def noted(inputs: StepInputs) -> Tensor:
        rows.append(len(inputs.token_ids_T))
        return forward(inputs)

    _speculator(engine)._forward = noted  # type: ignore[method-assign]
    run(engine, ask("r", [1, 2, 3], max_tokens=16, ignore_eos=True))
    assert engine.stats().accepted_tokens == engine.stats().draft_tokens == 12
    assert rows == [3, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]


def test_what_was_not_drafted_for_is_taken_in_later(options_of: MakeParts, tiny: Any) -> None:
    """While the gate is closed the draft model computes nothing; what it lacks of a prefix it computes itself."""
    engine = TwoModels(tiny.parts, **options_of())
    engine.gate.length = 0
    said = tokens(run(engine, ask("r", _prompt(1), max_tokens=30, ignore_eos=True))["r"])
    assert (engine.stats().draft_tokens, _speculator(engine)._steps) == (0, 0)
    for name, length in (("half", 0), ("rest", 4)):
        engine.add(ask(name, [*_prompt(1), *said], max_tokens=30, ignore_eos=True))
        for _ in range(8):
            engine.step()
        engine.gate.length = length
    assert engine.stats().prefix_hit_tokens > 0
    run(engine)
    stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_tokens > 0
    assert _agreeing_blocks(engine)[0] > 0


def test_long_gaps_are_closed_in_pieces_and_their_time_is_no_measure(options_of: MakeParts, tiny: Any) -> None:
    engine = TwoModels(tiny.parts, **options_of(max_num_batched_tokens=20))
    engine.gate.length = 0
    engine.add(ask("r", _prompt(1, 70), max_tokens=20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.gate.length, late = 4, list[bool]()
    while engine.has_work:
        engine.step()
        late.append(_speculator(engine).late)
    assert late[:4] == [True, True, True, False], "71 tokens in steps of 20"
    stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_tokens > 0


def test_graphs_take_the_small_steps(options_of: MakeParts, tiny: Any) -> None:
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 24}
    plain = Engine(clock=lambda: 0, **options_of(**options))
    expected = {name: tokens(events) for name, events in run(plain, *_crowd(12)).items()}
    engine = TwoModels(tiny.parts, capture=record, **options_of(**options, lookahead="replayed"))
    assert {name: tokens(events) for name, events in run(engine, *_crowd(12)).items()} == expected
    stats, graphs = engine.stats(), engine.drafter._graphs
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 0, "but for those behind a stop token"
    assert graphs is not None
    assert graphs.steps == _speculator(engine)._steps > 0


@pytest.mark.parametrize("reason", ["not_finite", "error"])
def test_a_draft_model_that_breaks_ends_drafts_and_no_request(
    options_of: MakeParts, tiny: Any, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine(clock=lambda: 0, **options_of())
    expected = {name: tokens(events) for name, events in run(plain, *_crowd(8)).items()}
    draft: Parts = tiny.load()
    engine = TwoModels(draft, **options_of())
    for request in _crowd(8):
        engine.add(request)
    events = [event for _ in range(4) for event in engine.step()]
    accepted = engine.stats().accepted_tokens
    assert accepted > 0
    if reason == "error":
        monkeypatch.setattr(draft.model, "embed", None)
    else:
        draft.model._weights.embed_VD.fill_(math.nan)
    with caplog.at_level(logging.WARNING):
        while engine.has_work:
            events += engine.step()
    found: dict[str, list[int]] = {}
    for event in events:
        assert event.error is None
        if event.token_id is not None:
            found.setdefault(event.request_id, []).append(event.token_id)
    assert found == expected
    assert engine.drafter.failures == {reason: 1}
    assert [record.message for record in caplog.records if "no more drafts" in record.message]
    drafted = engine.stats().draft_tokens
    run(engine, ask("after", [1, 2, 3], max_tokens=20, ignore_eos=True))
    assert engine.stats().draft_tokens == drafted


def test_a_worker_that_slept_drafts_again(options_of: MakeParts, tiny: Any) -> None:
    engine = TwoModels(tiny.parts, **options_of())
    request = ask("r", _prompt(1), max_tokens=20, ignore_eos=True)
    said = tokens(run(engine, request)["r"])
    engine.sleep()
    assert not engine.drafter._kv._layers
    engine.wake_up()
    engine.prepare()
    assert tokens(run(engine, request)["r"]) == said
    stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_tokens > 0


def test_the_engine_itself_drafts_by_the_model_that_it_is_given(options_of: MakeParts, tiny: Any) -> None:
    parts = options_of(speculative_config=DRAFTS)
    drafter = ModelDrafter(tiny.parts.model, tiny.link(), parts["options"])
    engine = Engine(clock=lambda: 0, drafter=drafter, **parts)
    run(engine, ask("r", _prompt(1), max_tokens=40, ignore_eos=True))
    assert engine.stats().accepted_tokens > 0
