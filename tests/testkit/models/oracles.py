"""What a server should answer, by the oracle, and what it does answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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


async def complete_all(server: Server, prompts: list[list[int]], count: int | Sequence[int]) -> list[list[int]]:
    """Ask for a greedy answer to each of ``prompts`` at once, of ``count`` tokens, or of its own number of them."""
    counts = [count] * len(prompts) if isinstance(count, int) else count
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [body | {"prompt": prompt, "max_tokens": own} for prompt, own in zip(prompts, counts, strict=True)]
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120) as client:
        asked = (client.post("/v1/completions", json=body) for body in bodies)
        found = await asyncio.gather(*asked)
    return [response.raise_for_status().json()["choices"][0]["token_ids"] for response in found]
