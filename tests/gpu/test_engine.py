"""An engine on a GPU gives the recorded answers, by CUDA graphs and eagerly, with steps launched ahead and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.gpu.decode_bench import Parts, answers_of, load, request, run
from testkit.models.tiny_models import CONFIGS, save_model
from testkit.pocket.answers import END, MAX_TOKENS, POCKET, recorded
from testkit.pocket.drafters import pocket_config, pocket_draft

from services.attention.step.cuda_graphs import CudaCapture
from services.attention.step.engine import Engine, EngineOptions
from services.attention.step.pipeline import Lookahead
from services.config.speculation import SpeculativeConfig
from services.model.products import InvariantProducts
from services.model.reference import ReferenceModel

pytestmark = pytest.mark.gpu1
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def pocket() -> Parts:
    return load(POCKET / "model", GPU, torch.float32)


@pytest.mark.parametrize("lookahead", ["off", "all"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eagerly", "by graph"])
def test_answers_are_the_recorded_ones(pocket: Parts, graphs: bool, lookahead: Lookahead) -> None:
    engine = pocket.engine(
        CudaCapture(GPU) if graphs else None, max_num_seqs=48, max_num_batched_tokens=256, kv_blocks=1024,
        max_model_len=512, lookahead=lookahead,
    )  # fmt: skip
    engine.prepare()
    wanted = recorded()
    found = run(engine, [request(one["id"], one["prompt_ids"], MAX_TOKENS, ignore_eos=False) for one in wanted])
    for one in wanted:
        assert _said(found.tokens[one["id"]]) == _said(one["output_ids"]), one["id"]
    stats = engine.stats()
    assert (stats.graph_steps > 0) == graphs
    assert (stats.steps_ahead > 0) == (lookahead == "all")


def test_recurrent_layers_answer_as_the_oracle(tmp_path: Path) -> None:
    """Prompts by chunks, decodes by graph, steps ahead; half of the prompts begin alike, and blocks run out."""
    save_model(tmp_path, CONFIGS["qwen3-next"])
    draw, oracle = random.Random(1), ReferenceModel.load(tmp_path)
    shared = [draw.randrange(96) for _ in range(20)]
    prompts = [shared[: 20 * (at % 2)] + [draw.randrange(96) for _ in range(1 + 3 * at)] for at in range(12)]
    parts = load(tmp_path, GPU, torch.float32)
    engine = parts.engine(
        CudaCapture(GPU), max_num_seqs=6, max_num_batched_tokens=40, kv_blocks=40, block_size=4, lookahead="all"
    )
    engine.prepare()
    found = run(engine, [request(f"r{at}", prompt, 12) for at, prompt in enumerate(prompts)]).tokens
    for at, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(oracle.logits(tokens)[-1].argmax()))
        assert found[f"r{at}"] == tokens[len(prompt) :], at
    stats = engine.stats()
    assert min(stats.graph_steps, stats.steps_ahead, stats.prefix_hit_tokens, stats.prefill_chunks) > 0


def _said(token_ids: list[int]) -> list[int]:
    return [token for token in token_ids if token != END]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_crowd_changes_no_bit_of_batch_invariant_answers(dtype: torch.dtype) -> None:
    """Tokens and log-probabilities: among others by graph, with prompts in pieces and little cache; alone, eagerly."""
    parts = load(POCKET / "model", GPU, dtype, InvariantProducts())
    requests = [request(one["id"], one["prompt_ids"], MAX_TOKENS, logprobs=5) for one in recorded()[:64]]
    sizes = {"max_num_batched_tokens": 256, "max_model_len": 512}
    alone = parts.engine(None, max_num_seqs=1, kv_blocks=64, prefix_cache=False, **sizes)
    crowded = parts.engine(CudaCapture(GPU), max_num_seqs=48, kv_blocks=96, lookahead="all", **sizes)
    crowded.prepare()
    wanted = {each.id: answers_of(alone, [each])[each.id] for each in requests}
    assert answers_of(crowded, requests) == wanted
    stats = crowded.stats()
    assert min(stats.graph_steps, stats.steps_ahead, stats.preemptions) > 0


@pytest.mark.parametrize("lookahead", ["off", "all"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eagerly", "by graph"])
@pytest.mark.parametrize("branches", [1, 4])
def test_drafts_change_no_answer(pocket: Parts, graphs: bool, lookahead: Lookahead, branches: int) -> None:
    """Each prompt is followed by its own answer, so that much of what is looked up there is right."""
    sizes = {"max_num_batched_tokens": 512, "max_model_len": 1024, "kv_blocks": 2048}
    requests = [
        request(one["id"], one["prompt_ids"] + one["output_ids"] + one["prompt_ids"], MAX_TOKENS, **sampling)
        for one, sampling in zip(recorded()[:64], [{}, {"temperature": 0.7, "top_p": 0.9}] * 32, strict=True)
    ]
    plain = pocket.engine(CudaCapture(GPU) if graphs else None, max_num_seqs=64, lookahead=lookahead, **sizes)
    drafting = pocket.engine(
        CudaCapture(GPU) if graphs else None, max_num_seqs=256, lookahead=lookahead,
        speculative_config=SpeculativeConfig(method="ngram", num_branches=branches), **sizes,
    )  # fmt: skip
    plain.prepare()
    drafting.prepare()
    assert run(drafting, requests).tokens == run(plain, requests).tokens
    stats = drafting.stats()
    assert stats.accepted_tokens > stats.draft_tokens / 10 > 0
    assert (stats.graph_steps > 0) == graphs


@pytest.mark.parametrize(("graphs", "branches"), [(False, 1), (True, 2)], ids=["eagerly", "by graph"])
def test_a_draft_model_changes_no_answer(pocket: Parts, graphs: bool, branches: int) -> None:
    """Its small steps are graphs, too; little cache and common beginnings; greedy and sampled; lookup beside it."""
    capture = CudaCapture(GPU) if graphs else None
    sizes = {"max_num_batched_tokens": 256, "max_model_len": 512, "kv_blocks": 200}
    requests = [
        request(f"{one['id']}-{at}", one["prompt_ids"] + one["output_ids"][:20], MAX_TOKENS, **sampling)
        for one in recorded()[:32]
        for at, sampling in enumerate([{}, {"temperature": 0.7, "top_p": 0.9}])
    ]
    plain = pocket.engine(capture, max_num_seqs=64, **sizes)
    options = EngineOptions(
        max_num_seqs=256, speculative_config=pocket_config(0, 4, branches), lookahead="all", **sizes
    )
    drafter = pocket_draft(0, GPU, torch.float32).drafter(options, capture)
    drafting = Engine[Any](
        model=pocket.model, link=pocket.link(), options=options, clock=lambda: 0, capture=capture, drafter=drafter
    )
    plain.prepare()
    drafting.prepare()
    assert run(drafting, requests).tokens == run(plain, requests).tokens
    stats = drafting.stats()
    assert stats.accepted_tokens > stats.draft_tokens / 4 > 0
    assert not drafter.failures
    assert ((drafter._graphs.steps if drafter._graphs else 0) > 0) == graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_drafts_change_no_bit_of_batch_invariant_answers(dtype: torch.dtype) -> None:
    parts = load(POCKET / "model", GPU, dtype, InvariantProducts())
    requests = [request(one["id"], 2 * one["prompt_ids"], MAX_TOKENS, logprobs=5) for one in recorded()[:16]]
    sizes = {"max_num_batched_tokens": 512, "max_model_len": 1024}
    alone = parts.engine(None, max_num_seqs=1, kv_blocks=64, prefix_cache=False, **sizes)
    drafting = parts.engine(
        CudaCapture(GPU), max_num_seqs=256, kv_blocks=400, lookahead="all",
        speculative_config=SpeculativeConfig(method="ngram"), **sizes,
    )  # fmt: skip
    drafting.prepare()
    wanted = {each.id: answers_of(alone, [each])[each.id] for each in requests}
    assert answers_of(drafting, requests) == wanted
    assert min(drafting.stats().accepted_tokens, drafting.stats().graph_steps) > 0
