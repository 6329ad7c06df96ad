"""Requests that come and go as a seed says, and what engines answer: the same, however their steps are ordered.

The model is the tiny one whose token NAN has an embedding that is not a number; token FATAL makes a step raise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from services.attention.step.engine import Engine
from services.messages import GenerateRequest, SamplingParams, TokenEvent

Sent = tuple[int, int, int | None, str | None, str | None, list[int] | None]
Story = dict[str, list[Sent]]
NAN, FATAL, VOCAB = 96, 95, 97
"""Tokens: one whose embedding is not a number, one with which a step raises."""


def ask(
    name: str, prompt: Sequence[int], max_tokens: int = 12, *, attempt: int = 1, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        attempt=attempt,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}),
        deadline_ms=10**12,
        priority=5,
        tenant="t",
        reply_to="g",
    )


def sent(event: TokenEvent) -> Sent:
    """All but what depends on when it was admitted, and the low bits of scores, on how large the batch was."""
    top = None if event.logprob is None else [token for token, _ in event.logprob.top]
    error = event.error.code if event.error else None
    return event.attempt, event.index, event.token_id, event.finish, error, top


def all_finite(engine: Engine[Any]) -> bool:
    return all(bool(kv.isfinite().all()) for kv in engine._kv._layers)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5, "logprobs": 3},
    {"repetition_penalty": 1.5, "temperature": 0.5},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"min_tokens": 5, "temperature": 1.0, "logit_bias": {3: 2.0, 50: -3.0}},
    {"logprobs": 2, "ignore_eos": False},
    {"temperature": 1.5, "prompt_logprobs": 1},
]


def cramped(*, blocks: int, block_size: int, budget: int, **more: Any) -> dict[str, Any]:
    """Options of an engine with ``blocks`` KV blocks, in which plots have room, and steps of ``budget`` tokens."""
    return {
        "kv_blocks": blocks if block_size > 3 else 60,
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        **more,
    }


class Plot:
    """Requests that come, get cancelled after a token of theirs or replaced by a later attempt, stop, break and raise.

    What happens to a request depends on its own events, so it is the same whenever these come. Without ``turns``
    nothing happens to any: of a cancelled one, events of the same step may be under way.
    """

    def __init__(self, seed: int, kinds: Sequence[dict[str, Any]] = KINDS, *, turns: bool = True) -> None:
        self._draw = draw = random.Random(seed)
        self._kinds, self._shared = kinds, [draw.randrange(1, 94) for _ in range(11)]
        self._pace = draw.choice([0.1, 0.5, 1.0])
        self.requests = [self._request(number) for number in range(draw.randrange(2, 14))]
        self._turns = {
            (request.id, draw.randrange(1, 9)): draw.choice(("cancel", "replace"))
            for request in self.requests
            if turns and draw.random() < 0.4
        }

    def _request(self, number: int) -> GenerateRequest:
        draw, sampling = self._draw, dict(self._draw.choice(self._kinds))
        if draw.random() < 0.4:
            sampling["stop_token_ids"] = tuple(draw.randrange(VOCAB) for _ in range(12))
        if draw.random() < 0.25:  # sooner or later it draws the token that breaks the step after it
            sampling["logit_bias"] = {draw.choice((NAN, FATAL)): draw.choice((4.0, 8.0, 100.0))}
        own = [draw.randrange(1, 94) for _ in range(draw.choice((1, 3, 8, 20)))]
        prompt = self._shared + own if number % 2 else own
        return ask(f"r{number}", prompt, draw.randrange(1, 30), seed=number, **sampling)

    def play(self, engine: Engine[Any]) -> Story:
        draw, story = random.Random(self._pace), Story()
        waiting = list(self.requests)
        for _ in range(3000):
            while waiting and draw.random() < self._pace:
                engine.add(waiting.pop())
            if not (waiting or engine.has_work):
                break
            for event in engine.step():
                mine = story.setdefault(event.request_id, [])
                mine.append(sent(event))
                if event.finish is None:
                    self._turn(engine, event.request_id, mine)
        assert not engine.has_work
        assert engine.stats().kv_used == 0
        assert all_finite(engine), "a broken row left NaN for the next owner of its block"
        assert all(of_one[-1][3] is not None for of_one in story.values())
        return story

    def _turn(self, engine: Engine[Any], name: str, mine: list[Sent]) -> None:
        turn = self._turns.get((name, len(mine)))
        if turn == "cancel":
            engine.cancel(name, mine[-1][0])
        elif turn == "replace":  # as after an attempt that was lost: with what it delivered
            request = next(request for request in self.requests if request.id == name)
            delivered = [token for _, _, token, *_ in mine if token is not None]
            engine.add(structs.replace(request, attempt=2, token_ids=[*request.token_ids, *delivered]))
