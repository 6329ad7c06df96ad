"""The whole server equals transformers' own ``generate``, token for token, for four families (others: test_families).

64 concurrent greedy REST requests of 1 to 300 prompt tokens, some sharing prefixes, some preempted because the KV
blocks ran out, with the prefix cache on and off.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.models.checkpoints import VOCAB, Answer, greedy_answers, router_margin, save_checkpoint
from testkit.processes.servers import bench

from services.model.reference import ReferenceModel

MARGIN = 1e-4
"""Smallest gap, in logits, of any token or router choice: far above float32 rounding, so equality is meant."""
SEEDS = {"qwen3_moe": 0, "qwen2_moe": 2, "mixtral": 3, "olmoe": 9}
REQUESTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    family: str
    folder: Path
    answers: list[Answer]


def prompts_and_lengths(seed: int = 7) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 300 tokens, every third of them sharing up to 200 leading tokens, and output lengths."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(200)]
    prompts = []
    for i in range(REQUESTS):
        length = [1, 2, 15, 16, 17, 31, 33, 300][i % 8] if i < 16 else rng.randint(1, 300)
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        if i % 3 == 0 and length > 20:
            common = min(length - 4, 200)
            prompt[:common] = shared[:common]
        prompts.append(prompt)
    return prompts, [rng.randint(16, 96) for _ in range(REQUESTS)]


@pytest.fixture(scope="module", params=sorted(SEEDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = request.param
    folder = save_checkpoint(tmp_path_factory.mktemp(family), family, SEEDS[family])
    answers = greedy_answers(folder, *prompts_and_lengths())
    assert min(answer.margin for answer in answers) >= MARGIN
    assert router_margin(folder, answers) >= MARGIN
    assert len({token for answer in answers for token in answer.tokens}) > 100, "answers too uniform to prove much"
    return Case(family=family, folder=folder, answers=answers)


def test_reference_repeats_transformers_greedy_choice(case: Case) -> None:
    oracle = ReferenceModel.load(case.folder)
    for answer in case.answers[:8]:
        logits = oracle.logits(answer.prompt + answer.tokens)
        picks = logits[len(answer.prompt) - 1 : -1].argmax(-1).tolist()
        assert picks == answer.tokens


async def complete_all(url: str, answers: list[Answer]) -> list[dict[str, Any]]:
    greedy = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [greedy | {"prompt": answer.prompt, "max_tokens": len(answer.tokens)} for answer in answers]
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    return [response.raise_for_status().json() for response in responses]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_server_equals_transformers(case: Case, tmp_path: Path, prefix_cache: bool) -> None:
    options = {
        "served_model_name": "tiny",
        "dtype": "float32",
        "kv_blocks": 40,  # 640 tokens for requests of up to 340: blocks must run out
        "max_model_len": 512,
        "max_num_batched_tokens": 96,
        "prefix_cache": prefix_cache,
    }
    with bench(tmp_path) as stage:
        server = stage.serve(case.folder, **options)
        got = asyncio.run(complete_all(server.url, case.answers))
        preemptions = server.metric("expertmesh_preemptions_total")
        hits = server.metric("expertmesh_prefix_cache_hit_tokens_total")
        chunks = server.metric("expertmesh_prefill_chunks_total")
    for answer, found in zip(case.answers, got, strict=True):
        assert found["choices"][0]["token_ids"] == answer.tokens
        assert found["usage"]["prompt_tokens"] == len(answer.prompt)
        assert found["usage"]["completion_tokens"] == len(answer.tokens)
    assert preemptions > 0
    assert (hits > 0) == prefix_cache
    assert chunks > 0
