"""``python -m perf.server.first_token``: time to the first token of a short and a long prompt through gateway, Redis,
scheduler and a worker that computes nothing: what the way itself takes. Needs ``PYTHONPATH=tests``."""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

import aiohttp
from abuse.kit.stage import Shape, Stage, on_stage

_WORDS = "the quick brown fox jumps over the lazy dog and runs away into the dark green forest "
_CONTEXT = 600_000


async def first_token_s(session: aiohttp.ClientSession, stage: Stage, text: str) -> float:
    """Seconds from sending a request to its first token."""
    body = {"prompt": text, "max_tokens": 1, "stream": True}
    headers = {"Authorization": f"Bearer {stage.secrets['bob']}"}
    began = time.perf_counter()
    async with session.post(f"{stage.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.content.readline()
        return time.perf_counter() - began


async def measure(stage: Stage, rounds: int) -> None:
    async with aiohttp.ClientSession() as session:
        for name, size, count in (("4 KB", 4_000, 10 * rounds), ("1 MB", 1_000_000, rounds)):
            text = (_WORDS * (size // len(_WORDS) + 1))[:size]
            times = [await first_token_s(session, stage, f"{number} {text}") for number in range(count + 2)][2:]
            ordered = sorted(times)
            spread = f"{ordered[len(ordered) // 10]:.4f} to {ordered[-1 - len(ordered) // 10]:.4f}"
            print(f"{name}: median {median(times):.4f} s of {count}, {spread} without the outer tenths", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token without an engine.")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with on_stage(Shape(streams=0, context=_CONTEXT, prefill=10**7, rate=500.0)) as stage:
        asyncio.run(measure(stage, options.rounds))


if __name__ == "__main__":
    main()
