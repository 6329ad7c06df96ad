"""Engines over a model with recurrent layers: what other tests ask of an engine holds where sequences have states, too.

A step that runs again, that was launched ahead and dropped, or that is computed one sequence after the other must start
from the states that it started from at first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from testkit.gpu.decode_bench import request
from testkit.gpu.decode_bench import run as run_all
from testkit.gpu.recorded_graph import record
from unit.attention.conftest import CONFIG, TinyModel, engines_over
from unit.attention.test_cuda_graphs import Keyed, keyed
from unit.attention.test_engine import (  # noqa: F401  collected here, over the model below
    test_a_prompt_whose_scores_are_not_numbers_fails,
    test_a_request_with_broken_numbers_fails_alone_and_leaves_clean_blocks,
    test_a_resumed_attempt_draws_what_the_first_would_have,
    test_a_step_that_raises_ends_only_the_guilty_request,
    test_a_typed_error_of_the_link_reaches_the_requests,
    test_broken_numbers_are_noticed_before_a_token_is_drawn,
    test_cancelling_frees_blocks_at_once_or_with_the_step_under_way,
    test_greedy_equals_the_oracle_whatever_the_batch_does,
    test_prompt_scores_equal_the_oracles,
    test_the_engine_outlives_a_broken_model,
    workload,
)
from unit.attention.test_lookahead import (  # noqa: F401
    engine_of,
    test_a_broken_row_that_comes_too_late_leaves_nothing_behind,
    test_a_filter_that_was_decided_too_early_draws_again,
    test_a_prompt_that_is_cancelled_under_way_leaves_its_draw_to_nobody,
    test_prompts_with_a_common_beginning_wait_for_the_first_of_them,
    test_steps_that_have_to_run_again_change_nothing,
    touchy,
)
from unit.attention.test_ping_pong import test_greedy_equals_the_oracle_in_ping_pong, wanted  # noqa: F401

from services.attention.batching.state_slots import StateSlots
from services.attention.step.engine import Engine
from services.attention.step.in_flight import InFlightStep
from services.model.load_spec import load_spec
from services.model.names import dense_shapes, expert_shapes
from services.model.reference import ReferenceModel

MakeEngine = Callable[..., Engine[Any]]
RECURRENT = CONFIG | {
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 16,
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("recurrent")
    (folder / "config.json").write_text(json.dumps(RECURRENT))
    spec = load_spec(folder)
    generator = torch.Generator().manual_seed(15)
    tensors = {}
    for name, shape in (dense_shapes(spec) | expert_shapes(spec)).items():
        values = torch.randn(shape, generator=generator)
        scaled = (4 if "conv1d" in name else 1.5) * values / shape[-1] ** 0.5
        tensors[name] = 0.1 * values + ("linear_attn.norm" in name) if len(shape) == 1 else scaled
    save_file(tensors, folder / "model.safetensors")
    return TinyModel(folder, ReferenceModel.load(folder))


@pytest.fixture(scope="module")
def build_engine(tiny: TinyModel) -> MakeEngine:
    """Of this module: what others have is cached for the session, over another model."""
    return engines_over(tiny)


def states_of(engine: Engine[Any]) -> StateSlots:
    states = engine._inputs._state_slots
    assert states is not None
    return states


PROMPTS = [[5, 9, 11], [3], [7] * 14, [2, 4, 6, 8, 10], [90, 80, 70, 60, 50, 40, 30]]


def answers(engine: Engine[Any], prompts: list[list[int]] = PROMPTS, count: int = 9) -> list[list[int]]:
    requests = [request(f"r{at}", prompt, count, ignore_eos=False) for at, prompt in enumerate(prompts)]
    return list(run_all(engine, requests).tokens.values())


def test_decodes_are_replayed_and_prompts_are_not(tiny: TinyModel, make_engine: MakeEngine) -> None:
    """By recorded graphs, whose inputs hold the slots of states; rows of no sequence write a slot that nobody reads."""
    engine = make_engine(capture=record, max_num_seqs=3)
    engine.prepare()
    assert engine.stats().graphs == 3, "of one, two and three decodes"
    for _ in range(2):
        assert answers(engine) == [tiny.greedy(prompt, 9) for prompt in PROMPTS]
    stats = engine.stats()
    assert 0 < stats.graph_steps < stats.steps
    for layer in tiny.reference.spec.recurrent_layers:
        assert all(not part[0].any() for part in engine._kv.states(layer)), "where sequences start"


def test_every_step_may_run_twice(tiny: TinyModel, make_engine: MakeEngine) -> None:
    for capture in (None, record):
        link: Keyed = keyed(tiny)
        engine = make_engine(link=link, capture=capture)
        engine.prepare()
        link.failing = frozenset(range(100))
        assert answers(engine) == [tiny.greedy(prompt, 9) for prompt in PROMPTS]


def test_a_step_of_many_that_raises_when_it_is_read_is_computed_again_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tiny: TinyModel, make_engine: MakeEngine
) -> None:
    """By then the step after it has run, with lookahead."""
    engine, failing, read = make_engine(), {3, 5}, InFlightStep.outcomes

    def broken(step: InFlightStep, model: Any) -> Any:
        if engine._steps.steps in failing and step.plan.sequences > 1:
            failing.remove(engine._steps.steps)
            raise RuntimeError("planted")
        return read(step, model)

    monkeypatch.setattr(InFlightStep, "outcomes", broken)
    assert answers(engine) == [tiny.greedy(prompt, 9) for prompt in PROMPTS]
    assert not failing
    assert engine.stats().step_failures["error"] == 2
    assert states_of(engine).used == 0


SHARED = [11, 22, 33, 44, 55, 66, 77, 88, 12, 23, 34, 45]


def test_a_prefix_is_hit_where_a_state_is_kept(tiny: TinyModel, make_engine: MakeEngine) -> None:
    """The first prompt keeps one where it ends, the second where it leaves the first, and the third starts there."""
    engine = make_engine()
    hits = []
    for tail in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [13, 14, 15, 16, 17]):
        before = engine.stats().prefix_hit_tokens
        assert answers(engine, [SHARED + tail], 4) == [tiny.greedy(SHARED + tail, 4)]
        hits.append(engine.stats().prefix_hit_tokens - before)
    assert hits == [0, 0, 12]


def test_a_conversation_goes_on_from_its_last_answer(tiny: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine()
    [answer] = answers(engine, [SHARED], 9)
    before, prompt = engine.stats().prefix_hit_tokens, [*SHARED, *answer, 31, 32]
    assert len(answer) == 9
    assert answers(engine, [prompt], 5) == [tiny.greedy(prompt, 5)]
    assert engine.stats().prefix_hit_tokens - before == 20, (
        "all full blocks of 21 tokens less the one that was drawn last"
    )


def test_without_a_prefix_cache_no_state_is_kept(tiny: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for _ in range(2):
        assert answers(engine, [SHARED], 6) == [tiny.greedy(SHARED, 6)]
    assert states_of(engine).kept == engine.stats().prefix_hit_tokens == 0


def test_asleep_it_holds_no_states_and_afterwards_answers_as_before(tiny: TinyModel, make_engine: MakeEngine) -> None:
    engine = make_engine(capture=record)
    engine.prepare()
    before = answers(engine)
    engine.sleep()
    assert engine._kv._states is not None
    assert not engine._kv._states._states
    engine.wake_up()
    engine.prepare()
    assert answers(engine) == before == [tiny.greedy(prompt, 9) for prompt in PROMPTS]


def test_more_sequences_than_run_at_once_and_less_room_than_they_need(tiny: TinyModel, make_engine: MakeEngine) -> None:
    """Preempted ones start again, from states that are kept if there are any; no slot is lost."""
    engine = make_engine(max_num_seqs=3, kv_blocks=9, max_num_batched_tokens=7)
    assert answers(engine, count=14) == [tiny.greedy(prompt, 14) for prompt in PROMPTS]
    assert engine.stats().preemptions > 0
    assert (states_of(engine).slots, states_of(engine).used) == (12, 0)
