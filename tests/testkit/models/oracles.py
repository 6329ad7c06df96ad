"""What a server should answer, by the oracle, and what it does answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from services.config import ExpertFormat
from services.model.reference import ReferenceModel
from testkit.processes.servers import Server

MARGIN = 1e-4
"""Smallest gap, in logits, of any token: far above float32 rounding."""


def oracles_answers(
    folder: Path, prompts: list[list[int]], count: int, *, expert_format: ExpertFormat = "dense"
) -> list[list[int]]:
    oracle, answers = ReferenceModel.load(folder, expert_format=expert_format), []
    for prompt in prompts:
        tokens: list[int] = []
        for _ in range(count):
            best = oracle.logits(prompt + tokens)[-1].topk(2)
            assert float(best.values[0] - best.values[1]) > MARGIN, "the oracle is not sure"
            tokens.append(int(best.indices[0]))
        answers.append(tokens)
    return answers


async def complete_all(server: Server, prompts: list[list[int]], count: int) -> list[list[int]]:
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": count}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = (client.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts)
        found = await asyncio.gather(*asked)
    return [response.raise_for_status().json()["choices"][0]["token_ids"] for response in found]
