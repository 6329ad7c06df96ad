"""Engines that verify trees of drafts against engines without drafts: the same tokens of every request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.gpu.recorded_graph import record
from testkit.models.drafting import DraftingEngine, Knowing, Same, truth_of
from testkit.models.engines import ask, run, tokens
from testkit.models.plots import FATAL, KINDS, NAN, Plot, all_finite, cramped

from services.attention.sequences.sequence import SequenceState
from services.attention.step.engine import Engine
from services.config.speculation import SpeculativeConfig

PLAIN = [kind for kind in KINDS if "min_tokens" not in kind]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([16, 20, 200]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seqs=st.sampled_from([12, 64]),
    budget=st.sampled_from([4, 64]),
    wrong=st.sampled_from([0.0, 0.2, 0.7]),
    depth=st.sampled_from([1, 3, 8]),
    branches=st.sampled_from([2, 5]),
    lookahead=st.sampled_from(["off", "all"]),
)
def test_every_request_gets_the_same_events(
    options_of: Callable[..., dict[str, Any]], seed: int, blocks: int, block_size: int, seqs: int, budget: int,
    wrong: float, depth: int, branches: int, lookahead: str,
) -> None:  # fmt: skip
    options = cramped(blocks=blocks, block_size=block_size, max_num_seqs=seqs, budget=budget)
    plot = Plot(seed, turns=False)
    expected = plot.play(Engine(clock=lambda: 0, **options_of(**options)))
    speculator = Knowing(truth_of(expected), seed, wrong)
    engine = DraftingEngine(speculator, depth, branches, **options_of(**options, lookahead=lookahead))
    assert plot.play(engine) == expected
    assert set(speculator.forgotten) >= set(expected)
    assert all_finite(engine)
    assert engine.stats().kv_used == 0


@pytest.mark.parametrize("seed", range(6))
def test_graphs_take_trees(options_of: Callable[..., dict[str, Any]], tiny: Any, seed: int) -> None:
    """By work lists, as on a GPU."""
    plot = Plot(seed, PLAIN, turns=False)
    options = {"model": tiny.parts.model, "max_num_batched_tokens": 48, "max_num_seqs": 48}
    options["speculative_config"] = SpeculativeConfig(method="ngram", num_branches=3)
    expected = plot.play(Engine(clock=lambda: 0, **options_of(**options)))
    speculator = Knowing(truth_of(expected), seed, 0.0)
    engine = DraftingEngine(speculator, 3, 3, **options_of(**options, capture=record, lookahead="replayed"))
    assert plot.play(engine) == expected
    stats = engine.stats()
    assert stats.graph_steps == stats.steps
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_sixty_four_streams_at_once(options_of: Callable[..., dict[str, Any]]) -> None:
    """Greedy and sampled, with little cache, prompts in pieces and common beginnings."""
    requests = [
        ask(f"r{number}", _prompt(number), max_tokens=24, seed=number, **{"ignore_eos": True} | PLAIN[number % 8])
        for number in range(64)
    ]
    options = {"kv_blocks": 300, "max_num_seqs": 160, "max_num_batched_tokens": 160}
    plain = Engine(clock=lambda: 0, **options_of(**options))
    expected = {name: tokens(events) for name, events in run(plain, *requests).items()}
    engine = DraftingEngine(Knowing(expected, 1, 0.2), 4, 4, **options_of(**options))
    assert {name: tokens(events) for name, events in run(engine, *requests).items()} == expected
    stats = engine.stats()
    assert min(stats.preemptions, stats.prefix_hit_tokens, stats.prefill_chunks, stats.accepted_tokens) > 0


def _prompt(number: int) -> list[int]:
    draw = random.Random(number % 16)
    return [draw.randrange(1, 94) for _ in range(18)]


class _Last(Knowing):
    """The right chain comes last: none of its nodes is in the slot of its position but for the common ones."""

    def chains(self, state: SequenceState, most: int, count: int) -> Sequence[Sequence[int]]:
        right = self._truth.get(state.request.id, [])[state.generated :][:most]
        wrong = [[*right[:at], *[(token + 1) % 90 for token in right[at:]]] for at in (0, 1)]
        return [*wrong[: count - 1], right] if right else []


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_branches_off_is_as_good_as_the_first_branch(
    options_of: Callable[..., dict[str, Any]], tiny: Any, kind: int
) -> None:
    """Later steps see what was moved; penalties count the tokens of each branch."""
    options = options_of(model=tiny.parts.model)
    request = ask("r", [1, 2, 3], max_tokens=31, seed=7, **{"ignore_eos": True} | KINDS[kind])
    plain = Engine(clock=lambda: 0, **options)
    said = tokens(run(plain, request)["r"])
    engine = DraftingEngine(_Last({"r": said}, 0, 0.0), 4, 3, **options)
    assert tokens(run(engine, request)["r"]) == said
    assert engine.stats().steps <= 11, "five tokens in each step but at the end, where trees are cut"
    again = ask("s", [1, 2, 3, *said[:24]], max_tokens=5)
    assert tokens(run(engine, again)["s"]) == tokens(run(plain, again)["s"])
    assert engine.stats().prefix_hit_tokens == plain.stats().prefix_hit_tokens > 0


def test_what_a_tree_has_beside_its_tokens_is_there_within_a_step_only(
    options_of: Callable[..., dict[str, Any]], tiny: Any
) -> None:
    request = ask("r", [1, 2, 3], max_tokens=31)
    options = options_of(model=tiny.parts.model)
    said = tokens(run(Engine(clock=lambda: 0, **options), request)["r"])
    engine, known = DraftingEngine(_Last({"r": said}, 0, 0.0), 4, 3, **options), 3
    engine.add(request)
    while engine.has_work:
        known += len(engine.step())
        assert engine.stats().kv_used <= 1 + -(-known // 4), "the last drafts are a chain, which keeps its block"
    assert engine.stats().accepted_tokens > 16


@pytest.mark.parametrize("bad", [NAN, FATAL])
def test_a_branch_that_breaks_harms_nobody(options_of: Callable[..., dict[str, Any]], bad: int) -> None:
    requests = [ask(f"r{number}", [number + 1, 2, 3], max_tokens=12) for number in range(3)]
    plain = Engine(clock=lambda: 0, **options_of())
    expected = {name: tokens(events) for name, events in run(plain, *requests).items()}
    engine = DraftingEngine(Same([[5, 6], [7, bad], [NAN, 8]]), 2, 3, **options_of(kv_blocks=20))
    assert {name: tokens(events) for name, events in run(engine, *requests).items()} == expected
    assert all_finite(engine)


def test_a_step_that_raises_late_leaves_no_branch_behind(
    options_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of all rows are in their slots when the draw raises, and one is NaN."""
    request = ask("r", [1, 2, 3], max_tokens=12)
    expected = tokens(run(Engine(clock=lambda: 0, **options_of()), request)["r"])
    engine = DraftingEngine(Same([[5, 6], [NAN, 8]]), 2, 2, **options_of())
    draw = engine._sampler.draw

    def only_decodes(logits: torch.Tensor, rows: Sequence[Any], *others: Any, **options: Any) -> Any:
        if len(rows) > 1:
            raise RuntimeError("planted")
        return draw(logits, rows, *others, **options)

    monkeypatch.setattr(engine._sampler, "draw", only_decodes)
    assert tokens(run(engine, request)["r"]) == expected
    assert engine.stats().step_failures["error"] > 1
    assert all_finite(engine)


def test_slots_are_moved_all_at_once(options_of: Callable[..., dict[str, Any]]) -> None:
    """A slot that is written may be read by another move."""
    kv = Engine(clock=lambda: 0, **options_of())._kv
    for layer in kv._layers:
        layer.copy_(torch.arange(layer.numel(), dtype=layer.dtype).view_as(layer))
    kv.token_ids_S.copy_(torch.arange(len(kv.token_ids_S)))
    before = [layer.flatten(1, 2).clone() for layer in kv._layers]
    kv.move(torch.tensor([7, 9, 5]), torch.tensor([5, 7, 21]))
    for layer, old in zip(kv._layers, before, strict=True):
        old[:, [5, 7, 21]] = old[:, [7, 9, 5]]
        assert torch.equal(layer.flatten(1, 2), old)
    assert kv.token_ids_S[[5, 7, 21, 9]].tolist() == [7, 9, 5, 9]
