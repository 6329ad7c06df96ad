"""Requests to an engine, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.attention.step.engine import Engine
from services.messages import GenerateRequest, SamplingParams, TokenEvent

MakeEngine = Callable[..., Engine[Any]]
FAR_MS = 10**12


def ask(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    attempt: int = 1,
    delivered: Sequence[int] = (),
    deadline_ms: int = FAR_MS,
    priority: int = 5,
    tenant: str = "t",
    cache_salt: str = "",
    wire: int = 1,
    **sampling: Any,
) -> GenerateRequest:
    """A request, greedy unless ``sampling`` says otherwise; ``delivered`` tokens came from earlier attempts."""
    return GenerateRequest(
        id=name,
        attempt=attempt,
        token_ids=[*prompt, *delivered],
        prompt_len=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0} | sampling),
        deadline_ms=deadline_ms,
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        reply_to="g",
        wire=wire,
    )


def run(engine: Engine[Any], *requests: GenerateRequest, limit: int = 3000) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left. Returns events by request; each has ended once."""
    for request in requests:
        engine.add(request)
    events: dict[str, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        limit -= 1
        assert limit
    assert engine.stats().kv_used == 0
    assert all(sum(event.finish is not None for event in of_one) == 1 for of_one in events.values())
    return events


def tokens(events: Iterable[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]
