"""Service times for `expertmesh plan --trace`, measured on a running server from its own series.

``python -m loadgen.measure_times --model DIR --json FILE`` serves DIR here with disaggregated experts, on the CPU, and
measures that; ``--url URL --metrics URL,URL,...`` measures a server that runs: the gateway's address, and the metrics
pages of its attention and expert workers. Nothing else should load it meanwhile.

A round keeps a number of sequences running; a line through the rounds' means gives what a step costs and what a row
adds. Prompts are measured with answers of one token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadgen.served import served

SEQUENCES = (1, 4, 16, 32)
PROMPT_TOKENS, SHORT = 256, 4
VOCABULARY = 1000
"""Token ids of prompts are lower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums of the series over all pages; times are in seconds."""

    steps: float
    step_s: float
    waited_s: float
    busy_s: float
    decoded: float
    prefilled: float

    def since(self, earlier: Totals) -> Totals:
        return Totals(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__slots__})


SERIES = {
    "steps": "expertmesh_engine_steps_total",
    "step_s": "expertmesh_engine_step_seconds_sum",
    "waited_s": "expertmesh_exchange_wait_seconds_total",
    "busy_s": "expertmesh_experts_busy_seconds_total",
    "decoded": "expertmesh_decode_tokens_total",
    "prefilled": "expertmesh_prefill_tokens_total",
}


def read_totals(pages: Sequence[str]) -> Totals:
    """Totals of the metrics pages at the URLs ``pages``."""
    sums = dict.fromkeys(SERIES.values(), 0.0)
    for page in pages:
        for family in text_string_to_metric_families(httpx.get(page, timeout=30).text):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
    return Totals(**{name: sums[series] for name, series in SERIES.items()})


async def _hold(url: str, model: str, sequences: int, seconds: float, prompt: int, tokens: int) -> None:
    """Keep ``sequences`` requests running, each with a prompt of its own."""
    chance, until = random.Random(sequences), time.monotonic() + seconds

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            ids = [chance.randrange(3, VOCABULARY) for _ in range(prompt)]
            body = {"model": model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=sequences)) as client:
        await asyncio.gather(*(keep_asking(client) for _ in range(sequences)))


def measure(url: str, pages: Sequence[str], *, shards: int, seconds: float) -> dict[str, float]:
    """Service times by the names of :class:`services.planner.day.times.ServiceTimes`; a round takes ``seconds``."""
    model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]

    def round_of(sequences: int, prompt: int, tokens: int) -> Totals:
        before = read_totals(pages)
        asyncio.run(_hold(url, model, sequences, seconds, prompt, tokens))
        time.sleep(2.5)  # the experts' series follow once a second
        return read_totals(pages).since(before)

    round_of(2, SHORT, 32)
    rounds = [round_of(sequences, SHORT, 256) for sequences in SEQUENCES]
    rows = [each.decoded / each.steps for each in rounds]
    own = line(rows, [(each.step_s - each.waited_s) / each.steps for each in rounds])
    seat = line(rows, [each.busy_s / each.steps / shards for each in rounds])
    waits = sum(each.waited_s for each in rounds) / sum(each.steps for each in rounds)
    busy = sum(each.busy_s for each in rounds) / sum(each.steps for each in rounds) / shards
    prompts = round_of(4, PROMPT_TOKENS, 1)
    return {
        "attention_step": own[0],
        "attention_row": own[1],
        "attention_prefill": (prompts.step_s - prompts.waited_s) / prompts.prefilled,
        "link_step": max(0.0, waits - busy),
        "experts_step": seat[0],
        "experts_row": seat[1] * shards,
        "experts_prefill": prompts.busy_s / prompts.prefilled,
    }


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares: where it meets x = 0, and its slope; neither below 0.

    >>> line([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    (1.0, 2.0)
    """
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle_x) ** 2 for each in x)
    slope = max(0.0, sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / max(spread, 1e-12))
    return max(0.0, middle_y - slope * middle_x), slope


@contextlib.contextmanager
def _served(model: Path, shards: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "--model",
        model,
        "--layout",
        "disaggregated",
        "--expert-workers",
        shards,
        "--dtype",
        "float32",
        "--threads",
        1,
    ]
    words += ["--overlap", "off", "--no-prefix-cache", "--log-level", "warning"]
    with served([str(word) for word in words], port=port) as server:
        yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint to serve here")
    parser.add_argument("--url", help="gateway of a server that runs")
    parser.add_argument("--metrics", help="its workers' metrics pages, comma-separated (default: the gateway's)")
    parser.add_argument("--shards", type=int, default=2, help="shard groups, of one seat each (default: 2)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of six rounds (default: 15)")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    given = parser.parse_args()
    if (given.model is None) == (given.url is None):
        parser.error("give either --model or --url")
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(_served(given.model, given.shards))
        pages = given.metrics.split(",") if given.metrics else [f"{url}/metrics"]
        times = measure(url, pages, shards=given.shards, seconds=given.seconds)
    source = f"measured at {given.model or given.url} with {given.shards} shard groups"
    text = json.dumps({**{name: float(f"{value:.4g}") for name, value in times.items()}, "source": source}, indent=1)
    given.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
