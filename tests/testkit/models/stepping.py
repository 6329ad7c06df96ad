"""An engine without a model: the next token is a function of all tokens before it, so a replay draws the same."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from services.errors import ErrorInfo, ExpertUnavailable
from services.messages import FinishReason, GenerateRequest, TokenEvent

VOCAB = 1000


def next_token(token_ids: list[int]) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % VOCAB


def continuation(prompt: list[int], count: int) -> list[int]:
    """The ``count`` tokens that follow ``prompt``."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class _Sequence:
    request: GenerateRequest
    token_ids: list[int]


@dataclass
class SteppingEngine:
    """One token per request and step. ``gate``, when cleared, holds steps back; ``fail`` makes the next one raise;
    ``without_experts`` ends all that is held for want of experts."""

    step_s: float = 0.001
    gate: threading.Event = field(default_factory=threading.Event)
    fail: bool = False
    without_experts: bool = False
    steps: int = 0
    added: list[tuple[str, int]] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _events: list[TokenEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._events)

    def held(self) -> dict[str, int]:
        return {name: sequence.request.attempt for name, sequence in self._sequences.items()}

    def add(self, request: GenerateRequest) -> None:
        self.added.append((request.id, request.attempt))
        self._sequences[request.id] = _Sequence(request, list(request.token_ids))

    def cancel(self, request_id: str, attempt: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.request.attempt <= attempt:
            self.cancelled.append((request_id, sequence.request.attempt))
            self._end(sequence, "cancelled")

    def step(self) -> list[TokenEvent]:
        self.gate.wait()
        if self.fail:
            raise ZeroDivisionError("the engine broke")
        time.sleep(self.step_s)
        self.steps += 1
        for sequence in list(self._sequences.values()):
            if self.without_experts:
                self._end(sequence, "error", ExpertUnavailable("No replica.", retry_after_s=3.0).info())
            else:
                self._advance(sequence)
        events, self._events = self._events, []
        return events

    def _advance(self, sequence: _Sequence) -> None:
        request = sequence.request
        index = len(sequence.token_ids) - request.prompt_len
        sequence.token_ids.append(next_token(sequence.token_ids))
        last = index + 1 >= request.sampling.max_tokens
        self._events.append(
            TokenEvent(
                request_id=request.id,
                attempt=request.attempt,
                index=index,
                token_id=sequence.token_ids[-1],
                finish="length" if last else None,
            )
        )
        if last:
            del self._sequences[request.id]

    def _end(self, sequence: _Sequence, finish: FinishReason, error: ErrorInfo | None = None) -> None:
        request = sequence.request
        del self._sequences[request.id]
        index = len(sequence.token_ids) - request.prompt_len
        self._events.append(
            TokenEvent(request_id=request.id, attempt=request.attempt, index=index, finish=finish, error=error)
        )
