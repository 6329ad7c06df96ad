"""The one measuring loop over an engine: requests go in, what each step and the whole took comes out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.attention.step.engine import Engine
from services.errors import BenchFailed
from services.messages import GenerateRequest, SamplingParams, TokenEvent

Clock = Callable[[], float]
_NEVER_MS = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One iteration of an engine. ``ended_s`` is the clock's, ``seconds`` since the step before it had ended. ``rows``
    went through the layers, ``prompt_tokens`` of them of prompts. ``graph``: it ran as a CUDA graph. ``ahead``: it was
    launched before the step before it was read."""

    ended_s: float
    seconds: float
    rows: int
    prompt_tokens: int
    graph: bool
    ahead: bool
    events: Sequence[TokenEvent]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Requests from the first step to the end of the last one. ``tokens``: answered, by request."""

    seconds: float
    steps: Sequence[Step]
    tokens: Mapping[str, int]
    preemptions: int


def stepped(engine: Engine[Any], clock: Clock = time.perf_counter) -> Iterator[Step]:
    """Steps the engine as long as it has work. What the caller does between two steps counts to the second of them.

    Raises:
        BenchFailed: the engine ended a request with an error.
    """
    before, last = engine.stats(), clock()
    while engine.has_work:
        events = engine.step()
        now, after = clock(), engine.stats()
        for event in events:
            if event.error is not None:
                raise BenchFailed(f"The engine refuses a request: {event.error.message}")
        yield Step(
            ended_s=now,
            seconds=now - last,
            rows=after.step_tokens,
            prompt_tokens=after.prefill_tokens - before.prefill_tokens,
            graph=after.graph_steps > before.graph_steps,
            ahead=after.steps_ahead > before.steps_ahead,
            events=events,
        )
        before, last = after, now


def run(
    engine: Engine[Any],
    requests: Sequence[GenerateRequest],
    *,
    on_step: Callable[[Step], None] = lambda _step: None,
    sync: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Ran:
    """Serves ``requests``, all at once, to their end. Who leaves it in the middle has to throw the engine away.

    Args:
        sync: waits until the device is idle.

    Raises:
        BenchFailed: a request ends with an error, or with fewer tokens than it asked for.
    """
    sync()
    tokens: Counter[str] = Counter()
    steps: list[Step] = []
    preempted, began = engine.stats().preemptions, clock()
    for request in requests:
        engine.add(request)
    for step in stepped(engine, clock):
        tokens.update(event.request_id for event in step.events if event.token_id is not None)
        steps.append(step)
        on_step(step)
    sync()
    seconds = clock() - began
    for request in requests:
        if tokens[request.id] != request.sampling.max_tokens:
            raise BenchFailed(f"{request.id} asked for {request.sampling.max_tokens} tokens, got {tokens[request.id]}.")
    return Ran(seconds=seconds, steps=steps, tokens=tokens, preemptions=engine.stats().preemptions - preempted)


def greedy(name: str, prompt: Sequence[int], max_tokens: int) -> GenerateRequest:
    """Returns a request for exactly ``max_tokens``."""
    return GenerateRequest(
        id=name,
        attempt=1,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True),
        deadline_ms=_NEVER_MS,
        priority=5,
        tenant="bench",
        reply_to="bench",
    )
