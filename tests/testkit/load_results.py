"""Results files of runs that never were: requests drawn from known distributions, put together as a run has them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

from loadgen.results import (
    Correctness,
    Counts,
    ErrorGroup,
    Event,
    Fairness,
    Group,
    Interval,
    Latency,
    Line,
    Objective,
    Rates,
    RequestRecord,
    Run,
    Schedule,
    Series,
    Target,
    Validity,
    Workload,
    WrongAnswer,
)

BEGAN = 1_795_800_000.0
TARGET = Target(url="http://127.0.0.1:8000", model="pocket-moe", server="expertmesh")
Wait = Callable[[random.Random, float], float]
"""Draws a wait in ms for a request that is due at a second."""


def latency(values_ms: Sequence[float]) -> Latency:
    """The distribution of ``values_ms``, of which there is at least one."""
    histogram = HdrHistogram(1, 3_600_000_000, 3)
    for value in values_ms:
        histogram.record_value(max(1, round(1000 * value)))
    values = histogram.get_percentile_to_value_dict(list(_PERCENTILES.values()))
    at = {name: values[share] / 1e3 for name, share in _PERCENTILES.items()}
    return Latency(
        count=len(values_ms),
        mean_ms=sum(values_ms) / len(values_ms),
        min_ms=min(values_ms),
        max_ms=max(values_ms),
        histogram=histogram.encode().decode(),
        **at,
    )


_PERCENTILES = {"p50_ms": 50.0, "p90_ms": 90.0, "p95_ms": 95.0, "p99_ms": 99.0, "p99_9_ms": 99.9}


def log_normal(median_ms: float, spread: float = 0.4) -> Wait:
    return lambda rng, _at_s: rng.lognormvariate(math.log(median_ms), spread)


def a_run(
    *,
    seconds: int = 60,
    rate: float = 20.0,
    seed: int = 0,
    ttft: Wait | None = None,
    gap: Wait | None = None,
    tokens: int = 16,
    **changes: Any,
) -> Run:
    """A run without a fault, of Poisson arrivals, but for ``changes`` of its fields."""
    rng, ttft, gap = random.Random(f"run {seed}"), ttft or log_normal(120.0), gap or log_normal(15.0, 0.3)
    due, firsts, ends, gaps = [], [], [], []
    at = rng.expovariate(rate)
    while at < seconds:
        first = ttft(rng, at)
        waits = [gap(rng, at + first / 1e3) for _ in range(tokens - 1)]
        due.append(at)
        firsts.append(first)
        gaps.append(waits)
        ends.append(first + sum(waits))
        at += rng.expovariate(rate)
    timeline = [_interval(second, due, firsts, gaps, ends) for second in range(seconds)]
    run = Run(
        version="0.1.0",
        label="evening",
        target=TARGET,
        schedule=Schedule(
            kind="poisson",
            text=f"Poisson, {rate:g} a second for {seconds} s",
            requests=len(due),
            duration_s=seconds,
            rate=rate,
        ),
        workload=Workload(
            kind="random", text="random prompts of 64 tokens", prompt_tokens_mean=64, output_tokens_mean=tokens
        ),
        began_at=BEGAN,
        duration_s=seconds,
        validity=Validity(valid=True, lag_p99_ms=0.4, lag_limit_ms=50 / rate),
        counts=Counts(scheduled=len(due), ok=len(due), tries=len(due), connections=len(due)),
        rates=Rates(
            requests=len(due) / seconds,
            output_tokens=tokens * len(due) / seconds,
            prompt_tokens=64 * len(due) / seconds,
        ),
        latency={
            "ttft": latency(firsts),
            "itl": latency([wait for waits in gaps for wait in waits]),
            "tpot": latency([sum(waits) / len(waits) for waits in gaps]),
            "e2e": latency(ends),
            "service_ttft": latency(firsts),
            "service": latency(ends),
            "lag": latency([0.2] * len(due)),
        },
        timeline=timeline,
        settings={"rate": rate, "seed": seed},
    )
    return msgspec.structs.replace(run, **changes)


def _interval(
    second: int, due: Sequence[float], firsts: Sequence[float], gaps: Sequence[Sequence[float]], ends: Sequence[float]
) -> Interval:
    mine = [number for number, at in enumerate(due) if int(at) == second]
    waits = [wait for number in mine for wait in gaps[number]]
    return Interval(
        at_s=float(second),
        seconds=1.0,
        scheduled=len(mine),
        sent=len(mine),
        ok=len(mine),
        output_tokens=sum(1 + len(gaps[number]) for number in mine),
        in_flight=len(mine),
        ttft=latency([firsts[number] for number in mine]) if mine else None,
        itl=latency(waits) if waits else None,
        e2e=latency([ends[number] for number in mine]) if mine else None,
    )


def a_disturbed_run(*, seconds: int = 90, **changes: Any) -> Run:
    """A run in which an expert worker is killed and attention is scaled, with all that a report may have."""

    def first(rng: random.Random, at_s: float) -> float:
        away = max(0.0, 32.0 - at_s) * 1e3 if 30 <= at_s < 32 else 0.0
        return log_normal(120.0)(rng, at_s) + away

    run = a_run(seconds=seconds, rate=12.0, ttft=first)
    errors = [
        ErrorGroup(
            kind="http 503", count=7, first_at_s=30.1, last_at_s=31.9, example="no replica of a shard group", status=503
        ),
        ErrorGroup(kind="ServerDisconnected", count=2, first_at_s=30.2, last_at_s=30.4, example="Server disconnected"),
    ]
    counts = msgspec.structs.replace(
        run.counts,
        ok=run.counts.ok - 12,
        refused=3,
        failed=6,
        disconnected=3,
        retried=11,
        refused_503=7,
        refused_429=4,
        retry_after=9,
    )
    wanted = [(float(at), 2.0 if at < 45 else 3.0) for at in range(0, seconds, 5)]
    ready = [(float(at), 2.0 if at < 60 else 3.0) for at in range(0, seconds, 5)]
    queue = [(float(at), 40.0 if at == 30 else 1.0) for at in range(0, seconds, 5)]
    tenants = [
        Group(
            name=name,
            counts=Counts(scheduled=500, ok=500 - bad, refused=bad),
            rates=Rates(requests=6, output_tokens=share * 190),
            share=share,
            latency={metric: run.latency[metric] for metric in ("ttft", "itl", "e2e")},
        )
        for name, share, bad in (("blue", 0.6, 2), ("green", 0.4, 1))
    ]
    whole = msgspec.structs.replace(
        run,
        label="experts-1 killed, attention scaled",
        counts=counts,
        errors=errors,
        objectives=[
            Objective(
                metric="ttft",
                percentile=99,
                target_ms=500,
                value_ms=1210,
                low_ms=900,
                high_ms=1900,
                met=False,
                share_within=0.96,
            ),
            Objective(
                metric="tpot",
                percentile=95,
                target_ms=40,
                value_ms=17.5,
                low_ms=17.2,
                high_ms=17.9,
                met=True,
                share_within=1,
            ),
        ],
        tenants=tenants,
        fairness=Fairness(tenants=2, index=0.96, slowdown=0.99),
        correctness=Correctness(reference="answers.json", checked=900, wrong=0, unknown=3),
        events=[
            Event(at_s=30, action="kill", target="experts-1", began_s=30.002, ended_s=30.01, detail="process 4711"),
            Event(
                at_s=60,
                action="scale",
                target="attention=3",
                began_s=60.0,
                ended_s=60.4,
                detail="deployment/mesh-attention",
            ),
        ],
        series=[
            Series(
                name="Replicas",
                query="max by (role) (expertmesh_wanted_replicas)",
                unit="replicas",
                lines=[Line(label="wanted attention", points=wanted), Line(label="ready attention", points=ready)],
            ),
            Series(
                name="Queue",
                query="max(expertmesh_queue_requests)",
                unit="requests",
                lines=[Line(label="", points=queue)],
            ),
            Series(name="Errors of the server", query="sum by (code) (rate(expertmesh_request_errors_total[1m]))"),
        ],
        slowest=[
            RequestRecord(
                number=371,
                scheduled_s=30.05,
                outcome="ok",
                sent_s=30.05,
                first_token_s=32.4,
                ended_s=32.9,
                tries=2,
                status=200,
                output_tokens=16,
                tenant="blue",
                request_id="req-371",
            )
        ],
        environment={"cpus": 2, "kernel": "6.1", "python": "3.11.4", "load_average_1m": 1.4},
        settings=run.settings | {"gpus": 4, "price_per_gpu_hour": 3.0},
    )
    return msgspec.structs.replace(whole, **changes)


def wrong(number: int = 7) -> WrongAnswer:
    return WrongAnswer(number=number, expected="a lighthouse", found="a light", differs_at=3)
