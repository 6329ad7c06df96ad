"""An open-loop load of completions that all have the same lengths, and the figures of one run of it.

A load goes out to a server through :func:`drive`; :class:`Figures` come back, from here or from another client that
has sent the same load (``loadgen.other_clients``). Definitions are those of `vllm bench serve`: latencies count from
the moment a request is sent, connecting included; TPOT is a request's time after its first token over its other tokens;
ITL are the single gaps between the chunks of all requests. Percentiles are interpolated.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loadgen.client import StreamResult, stream_completion
from loadgen.connections import Broken, Session
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals
from loadgen.timers import Timers

TOKEN_IDS = range(10, 1000)
"""Of prompts: no special ones, and few enough for any vocabulary."""


class Arrivals(StrEnum):
    """How requests come at a rate: a Poisson process, or one after the other at equal intervals."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """``requests`` to the server at ``url``. ``rate``: arrivals a second, None for all at once. ``tokenizer`` is a
    folder or a name on a hub, for clients that make prompts of text."""

    url: str
    model: str
    tokenizer: str
    rate: float | None
    requests: int
    prompt_tokens: int
    output_tokens: int
    arrivals: Arrivals = Arrivals.POISSON
    seed: int = 0

    def body(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Returns the request that has ``prompt``: greedy, and as long as it may be."""
        asked = {"model": self.model, "prompt": list(prompt), "max_tokens": self.output_tokens}
        return asked | {"temperature": 0, "ignore_eos": True}

    def prompts(self) -> list[list[int]]:
        """Returns random token ids, others for each seed: no prefix cache knows them."""
        rng = random.Random(f"prompts {self.seed}")
        return [[rng.choice(TOKEN_IDS) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]

    def times(self) -> list[float]:
        """Returns when each request is sent, in seconds from the first on, in order."""
        if self.rate is None:
            return [0.0] * self.requests
        gaps = Gaps(0.0 if self.arrivals is Arrivals.CONSTANT else 1.0)
        times = arrivals(flat(self.rate), gaps, seed=self.seed, requests=self.requests).times
        return [moment - times[0] for moment in times]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one client measured. Latencies are in ms; those that a client does not report are None. ``lag_p99_ms``: how
    late requests were sent. ``error`` is that of the first request that failed."""

    completed: int
    failed: int
    requests_s: float
    output_tokens_s: float
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    lag_p99_ms: float | None = None
    error: str | None = None


async def drive(load: Load, on_progress: Callable[[int], None] = lambda _ended: None) -> Figures:
    """Send ``load``, each request at its time whether earlier ones have ended or not. ``on_progress`` gets the number
    of requests that have ended, after each one."""
    results: list[StreamResult] = []
    timers = Timers()
    async with Session(between=timers.poll) as session:
        began = time.perf_counter()

        async def send(prompt: Sequence[int], at: float) -> float:
            await timers.until(began + at)
            lag = time.perf_counter() - began - at
            result = StreamResult(started=time.perf_counter())
            try:
                result = await stream_completion(session, load.url, load.body(prompt))
            except Broken as error:
                result.error = f"{type(error).__name__}: {error}"
            results.append(result)
            on_progress(len(results))
            return lag

        lags = await asyncio.gather(*(send(*each) for each in zip(load.prompts(), load.times(), strict=True)))
    timers.close()
    return figures(results, lags)


def figures(results: Sequence[StreamResult], lags: Sequence[float]) -> Figures:
    """Returns the figures of ``results``. Requests that failed count as such and nowhere else."""
    good = [result for result in results if _good(result)]
    wall_s = max((_end(result) for result in good), default=0.0) - min((r.started for r in good), default=0.0)
    ttft = [result.chunk_times[0] - result.started for result in good]
    tpot = [
        (result.chunk_times[-1] - result.chunk_times[0]) / (result.completion_tokens - 1)
        for result in good
        if result.completion_tokens > 1
    ]
    itl = [end - begin for result in good for begin, end in itertools.pairwise(result.chunk_times)]
    return Figures(
        completed=len(good),
        failed=len(results) - len(good),
        requests_s=len(good) / wall_s if wall_s else 0.0,
        output_tokens_s=sum(result.completion_tokens for result in good) / wall_s if wall_s else 0.0,
        ttft_p50_ms=percentile_ms(ttft, 50),
        ttft_p99_ms=percentile_ms(ttft, 99),
        tpot_p50_ms=percentile_ms(tpot, 50),
        tpot_p99_ms=percentile_ms(tpot, 99),
        itl_p50_ms=percentile_ms(itl, 50),
        itl_p99_ms=percentile_ms(itl, 99),
        lag_p99_ms=percentile_ms(lags, 99),
        error=next((result.error or "the stream has no end" for result in results if not _good(result)), None),
    )


def _good(result: StreamResult) -> bool:
    return result.whole and result.error is None


def _end(result: StreamResult) -> float:
    assert result.ended is not None, "a whole answer has ended"
    return result.ended


def percentile_ms(seconds: Sequence[float], percent: int) -> float | None:
    """Returns the percentile in ms, interpolated between neighbours; None without values.

    >>> percentile_ms([0.001, 0.002, 0.004], 50), percentile_ms([0.0, 0.1], 99), percentile_ms([], 50)
    (2.0, 99.0, None)
    """
    if not seconds:
        return None
    if len(seconds) == 1:
        return 1e3 * seconds[0]
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]
