"""What holding experts quantised changes of the pocket model's answers: perplexity and tokens, through the server.

    PYTHONPATH=.:kernels:tests:examples/pocket-moe python3 perf/server/expert_formats.py     (two CPU cores, 25 minutes)

The pocket model is rounded by `expertmesh serve --expert-format`. Of each server, in bfloat16:

    perplexity   of this repository's documents, which no model was trained on, in pieces of 256 tokens: by the
                 log-probabilities that the server gives for prompts (echo, logprobs, one token)
    answers      of the 200 recorded prompts, those that differ from the ones of dense experts
    agreed       tokens before the first that differs, of all tokens of those answers
    tokens/s     of all these answers, 32 at a time, and what a million cost by the load report's formula where an hour
                 costs 1
    MiB          of experts in memory
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import httpx
import torch
from testkit.pocket.answers import POCKET, complete_all, recorded, serve_pocket
from testkit.processes.servers import bench
from tokenizers import Tokenizer

from loadgen.report.cost import Cost
from services.config import ExpertFormat
from services.model.held_experts import expert_bytes
from services.model.load_spec import load_spec
from services.model.weights_sample import with_weights

MODEL, ROOT = POCKET / "model", Path(__file__).parents[2]
PIECE, AT_ONCE = 256, 32
FORMATS: tuple[ExpertFormat, ...] = ("dense", "int8", "int4-channel", "int4", "fp8", "mxfp4")


def pieces(most: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = "\n\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
    tokens = tokenizer.encode(text).ids
    return [tokens[at : at + PIECE] for at in range(0, len(tokens) - PIECE, PIECE)][:most]


async def nats(url: str, texts: Sequence[list[int]]) -> float:
    """Mean over all tokens but the first of each piece."""
    limit = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(text: list[int]) -> list[float]:
            body = {"model": "pocket", "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
            async with limit:
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            scores = answer["choices"][0]["logprobs"]["token_logprobs"][1:PIECE]
            assert len(scores) == PIECE - 1
            return [-float(score) for score in scores]

        found = await asyncio.gather(*map(one, texts))
    return sum(map(sum, found)) / (len(texts) * (PIECE - 1))


def agreed(answers: Sequence[list[int]], dense: Sequence[list[int]]) -> tuple[int, float]:
    """Answers that differ, and the share of the dense ones' tokens before the first difference."""
    pairs = list(zip(answers, dense, strict=True))
    same = sum(len(list(takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))) for pair in pairs)
    return sum(mine != theirs for mine, theirs in pairs), same / sum(map(len, dense))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=160)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="the first one is what others are compared with")
    options = parser.parse_args()
    texts, wanted = pieces(options.pieces), recorded()
    print(f"{len(texts) * (PIECE - 1):,} tokens of documents, {len(wanted)} answers, {options.dtype}, CPU")
    dense: tuple[float, list[list[int]]] | None = None
    with tempfile.TemporaryDirectory() as place:
        for form in options.formats:
            spec = with_weights(load_spec(MODEL), MODEL, form)
            (own := Path(place) / form).mkdir()
            with bench(own) as stage:
                server = serve_pocket(stage, dtype=options.dtype, threads=2, lease=30, expert_format=form)
                began = time.perf_counter()
                choices = asyncio.run(complete_all(server.url, wanted, AT_ONCE))
                seconds = time.perf_counter() - began
                mean = asyncio.run(nats(server.url, texts))
            answers = [list(choice["token_ids"]) for choice in choices]
            dense = dense or (mean, answers)
            differ, share = agreed(answers, dense[1])
            rate = sum(map(len, answers)) / seconds
            cost = Cost(gpus=1, gpu_hours=seconds / 3600, output_tokens_per_gpu_hour=3600 * rate, price=1.0)
            itemsize = getattr(torch, options.dtype).itemsize
            print(
                f"{form:12} perplexity {math.exp(mean):.3f} (x {math.exp(mean - dense[0]):.4f})  answers {differ:3}  "
                f"agreed {share:.1%}  {rate:.0f} tokens/s, a million {cost.per_million_output_tokens:.2f}  "
                f"{expert_bytes(spec, itemsize) / 2**20:.2f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
