"""Families that are flags of one spec: the whole server equals transformers' own ``generate``, token for token.

64 concurrent greedy REST requests, of which some share prefixes, chunked, and preempted because the KV blocks ran out;
and in layouts whose experts are elsewhere, where an expert worker is killed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from testkit.models.checkpoints import VOCAB, Answer, greedy_answers, save_checkpoint
from testkit.models.oracles import complete_all
from testkit.processes.servers import Server, bench
from testkit.waiting import until

from services.model.reference import ReferenceModel

pytestmark = pytest.mark.alone

MARGIN, ROUTER_MARGIN = 1e-4, 1e-5
"""Smallest gap, in logits and in what routers compare, of any choice: far above float32 rounding."""
SEEDS = {
    "deepseek_v2": 0,
    "deepseek_v3": 0,
    "dots1": 0,
    "ernie4_5_moe": 0,
    "exaone_moe": 1,
    "glm4_moe": 0,
    "gpt_oss": 0,
    "glm4_moe_lite": 0,
    "hy_v3": 0,
    "minimax_m2": 0,
    "qwen3_5_moe_text": 3,
    "qwen3_next": 1,
    "solar_open": 4,
}
APART = {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 1}
COLOCATED = {"layout": "colocated", "workers": 2}
SLICED = {"layout": "lockstep", "workers": 2, "expert_slices": 2}
ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", APART),
    ("glm4_moe", COLOCATED),
    ("exaone_moe", APART),
    ("minimax_m2", COLOCATED),
    ("ernie4_5_moe", APART),
    ("gpt_oss", APART),
    ("gpt_oss", COLOCATED),
    ("gpt_oss", SLICED),
    ("deepseek_v3", APART),
    ("deepseek_v3", COLOCATED),
    ("qwen3_next", APART),
    ("qwen3_next", COLOCATED),
    ("qwen3_5_moe_text", APART),
]
OPTIONS = {"served_model_name": "tiny", "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 48}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    folder: Path
    answers: list[Answer]


def prompts_and_lengths(seed: int = 7) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 60 tokens, every third of them sharing up to 40 leading ones, and output lengths."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = []
    for i in range(64):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))]
        if i % 3 == 0 and len(prompt) > 20:
            common = min(len(prompt) - 4, 40)
            prompt[:common] = shared[:common]
        prompts.append(prompt)
    return prompts, [rng.randint(16, 40) for _ in prompts]


def made(folder: Path, family: str) -> Case:
    save_checkpoint(folder, family, SEEDS[family])
    answers = greedy_answers(folder, *prompts_and_lengths())
    oracle = ReferenceModel.load(folder)
    assert min(answer.margin for answer in answers) >= MARGIN
    for answer in answers:
        assert float(oracle.run(answer.prompt + answer.tokens[:-1]).router_margin_T.min()) >= ROUTER_MARGIN
    assert len({token for answer in answers for token in answer.tokens}) > 50, "answers too uniform to prove much"
    return Case(folder=folder, answers=answers)


def answers_of(server: Server, case: Case) -> list[list[int]]:
    prompts, counts = [answer.prompt for answer in case.answers], [len(answer.tokens) for answer in case.answers]
    return asyncio.run(complete_all(server, prompts, counts))


@pytest.mark.parametrize("family", sorted(SEEDS))
def test_server_equals_transformers(tmp_path: Path, family: str) -> None:
    case = made(tmp_path / "model", family)
    with bench(tmp_path) as stage:
        server = stage.serve(case.folder, **OPTIONS, kv_blocks=12)
        got = answers_of(server, case)
        preemptions = server.metric("expertmesh_preemptions_total")
        hits = server.metric("expertmesh_prefix_cache_hit_tokens_total")
        chunks = server.metric("expertmesh_prefill_chunks_total")
    assert got == [answer.tokens for answer in case.answers]
    assert min(preemptions, hits, chunks) > 0


@pytest.mark.parametrize(
    ("family", "layout"), ELSEWHERE, ids=[f"{family}-{layout['layout']}" for family, layout in ELSEWHERE]
)
def test_so_it_does_where_experts_are_elsewhere(tmp_path: Path, family: str, layout: dict[str, Any]) -> None:
    case = made(tmp_path / "model", family)
    wanted = [answer.tokens for answer in case.answers]
    with bench(tmp_path) as stage:
        server = stage.serve(case.folder, **OPTIONS, kv_blocks=32, **layout)
        assert answers_of(server, case) == wanted
        if layout == APART:
            server.of_role("experts")[0].kill()
            until(lambda: len(server.of_role("experts")) == 2, "another one was started")
            until(lambda: server.metric("expertmesh_expert_seats") == 2, "it took the seat's place")
            assert answers_of(server, case) == wanted
