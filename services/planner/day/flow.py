"""How fast a server steps, by its replicas and sequences: a closed queue at each shard group.

Attention workers call every group in each step and wait for the slowest answer. At a seat that several workers call, a
call waits for the others' calls (Schweitzer's approximation of mean-value analysis: an arrival meets the mean number of
calls, but for its own share).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.day.times import ServiceTimes

ROUNDS = 6
MAX_PREFILL = 0.9
"""Share of a worker's time that prompts may take from decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What the workers have to do together. ``batch``: sequences that decode; ``prefill``: prompt tokens per second;
    ``shares``: share of the rows by shard group."""

    batch: float
    prefill: float
    shares: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """How a server steps. ``step_s``: seconds from token to token of a sequence. ``callers``: workers that step. By
    group: seats that are busy, calls that wait for others, share of the step that is spent waiting for the group."""

    step_s: float
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    stall: tuple[float, ...]
    callers: float


def flow(times: ServiceTimes, attention: int, seats: Sequence[int], demand: Demand, guess_s: float) -> Flow | None:
    """Return the flow. None: no attention worker, or a group without a seat. ``guess_s``: the step's last time."""
    if attention < 1 or min(seats) < 1:
        return None
    rows = max(1.0, demand.batch / attention)
    duty = min(1.0, demand.batch / attention)
    service = [times.experts_step + rows * share * times.experts_row for share in demand.shares]
    own_s = times.attention_step + rows * times.attention_row + times.link_step
    prompts = [demand.prefill * share * times.experts_prefill for share in demand.shares]
    prefill_s = times.attention_prefill + max(demand.shares) * times.experts_prefill
    taken = min(MAX_PREFILL, demand.prefill / attention * prefill_s)
    others = (attention - 1) / attention
    step_s, answers = max(guess_s, own_s), service
    for _ in range(ROUNDS):
        calls = attention * duty * (1 - taken) / step_s
        answers = [
            _answer(
                alone, min(attention * duty / many, calls / many * wait), attention * duty / many, others * load / many
            )
            for alone, wait, many, load in zip(service, answers, seats, prompts, strict=True)
        ]
        step_s = 0.5 * (step_s + own_s + max(answers))
    calls = attention * duty * (1 - taken) / step_s
    return Flow(
        step_s=step_s / (1 - taken),
        busy=tuple(
            min(float(many), calls * alone + load) for alone, many, load in zip(service, seats, prompts, strict=True)
        ),
        waiting=tuple(calls * (wait - alone) for alone, wait in zip(service, answers, strict=True)),
        stall=_stalls(answers, step_s),
        callers=attention * max(duty, taken),
    )


def _answer(alone_s: float, there: float, callers: float, prompts: float) -> float:
    """Return the seconds to the answer to a call that takes ``alone_s`` alone: ``there`` calls are at the seat."""
    met = there * max(0.0, 1 - 1 / callers) if callers > 0 else 0.0
    return alone_s * (1 + met) / (1 - min(MAX_PREFILL, prompts))


def _stalls(answers: Sequence[float], step_s: float) -> tuple[float, ...]:
    """Return the share of the step that is spent waiting for each group. Groups that are waited for at the same time
    share it, as in :class:`services.fabric.wait_times.Stalls`."""
    stalls, before, share = [0.0] * len(answers), 0.0, 0.0
    order = sorted(range(len(answers)), key=lambda group: answers[group])
    for passed, group in enumerate(order):
        share += (answers[group] - before) / (len(order) - passed)
        before = answers[group]
        stalls[group] = share / step_s
    return tuple(stalls)
