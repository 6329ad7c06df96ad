"""An attention worker whose engine computes nothing: all else of it is the real one (inbox, publisher, leases).

Its answers are those of :mod:`abuse.kit.tokens`, at a set rate; prompts take time by their length, one after the other,
and wait in the real engine's line; log-probabilities come as asked for. Torch-free.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abuse.kit.tokens import BABBLE, BURST, BURST_TOKENS, BURSTS, HOLD, POISON, Answers
from services.attention.batching.waiting_line import WaitingLine
from services.attention.worker import AttentionWorker, WorkerOptions
from services.messages import FinishReason, GenerateRequest, PromptScores, TokenEvent, TokenLogprob, WorkerInfo
from services.model.load_spec import load_spec
from services.queue.clock import RedisClock
from services.queue.connect import connect
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.queue.worker_side import WorkerQueue
from services.runtime import incarnation
from services.wire import WIRE

_FUSE_S = 1.0
_ALTERNATIVES = 20
_CHUNK = 512
"""Prompt tokens whose scores travel together, as with the real engine."""
_CREDIT_TOKENS = 8_000_000


def token_scores(token: int, width: int) -> TokenLogprob:
    return TokenLogprob(-1.0, [((token + i) % 8000, -1.0 - i / 7) for i in range(width)])


def prompt_scores(start: int, count: int, width: int) -> PromptScores:
    """Of ``count`` tokens of a prompt from ``start`` on; all alike, for this process is not the one to be tried."""
    alternatives = range(width)
    return PromptScores(
        start=start,
        width=width,
        logprobs=struct.pack("<f", -1.0) * count,
        top_ids=struct.pack(f"<{width}i", *(300 + i for i in alternatives)) * count,
        top_logprobs=struct.pack(f"<{width}f", *(-1.0 - i / 7 for i in alternatives)) * count,
    )


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GenerateRequest
    arrival: int
    key: int
    unread: int
    index: int
    since: float
    preempted: bool = False  # never, as there is room for all

    @property
    def kind(self) -> int:
        return self.request.token_ids[0]


@dataclass(kw_only=True)
class StandInEngine:
    """``rate`` steps a second, each with a token for every sequence whose prompt was read; ``prefill`` prompt tokens
    are read in a step, and a prompt that was begun is finished before the next one."""

    answers: Answers
    rate: float
    prefill: int
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _waiting: WaitingLine[_Sequence] = field(default_factory=WaitingLine)
    _reading: _Sequence | None = None
    _arrivals: Iterator[int] = field(default_factory=itertools.count)
    _events: list[TokenEvent] = field(default_factory=list)
    _due: float = 0.0
    _burst: int = BURSTS

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._events)

    def held(self) -> dict[str, int]:
        return {name: sequence.request.attempt for name, sequence in self._sequences.items()}

    def add(self, request: GenerateRequest) -> None:
        prompt = request.token_ids[: request.prompt_len]
        sequence = _Sequence(
            request,
            next(self._arrivals),
            self.answers.key(prompt),
            len(request.token_ids),
            request.delivered,
            time.monotonic(),
        )
        if (earlier := self._sequences.get(request.id)) is not None:
            self._forget(earlier)
        self._sequences[request.id] = sequence
        self._waiting.add(sequence)

    def cancel(self, request_id: str, attempt: int) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.request.attempt <= attempt:
            self._emit(sequence, None, "cancelled")

    def step(self) -> list[TokenEvent]:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = max(self._due + 1 / self.rate, time.monotonic())
        self._read_on()
        self._burst = BURSTS
        for sequence in list(self._sequences.values()):
            self._advance(sequence)
        events, self._events = self._events, []
        return events

    def _read_on(self) -> None:
        budget = self.prefill
        while budget and (self._reading is not None or len(self._waiting)):
            if self._reading is None:
                self._reading = self._waiting.first
                self._waiting.start(self._reading)
            budget -= self._read(self._reading, budget)
            if not self._reading.unread:
                self._reading = None

    def _read(self, sequence: _Sequence, budget: int) -> int:
        """Reads so much of its prompt, scores included; how much it was."""
        whole = len(sequence.request.token_ids)
        first, count = whole - sequence.unread, min(budget, sequence.unread)
        sequence.unread -= count
        width = sequence.request.sampling.prompt_logprobs
        if width is not None:
            last = min(first + count, sequence.request.prompt_len)
            for start in range(max(first, 1), last, _CHUNK):
                scores = prompt_scores(start, min(_CHUNK, last - start), min(width, _ALTERNATIVES))
                self._events.append(_event(sequence, scores=scores))
        return count

    def _advance(self, sequence: _Sequence) -> None:
        if sequence.kind == POISON and time.monotonic() > sequence.since + _FUSE_S:
            os.kill(os.getpid(), signal.SIGKILL)
        if sequence.unread or sequence.kind in (HOLD, POISON):
            return
        most = sequence.request.sampling.max_tokens
        if not most:
            self._emit(sequence, None, "length")
        tokens = min(BURST_TOKENS, max(self._burst, 1)) if sequence.kind == BURST else 1
        self._burst -= tokens - 1
        for _ in range(tokens):
            if sequence.index < most:
                self._emit(sequence, self._drawn(sequence), "length" if sequence.index + 1 == most else None)

    def _drawn(self, sequence: _Sequence) -> int:
        if sequence.kind == BABBLE:
            return sequence.request.token_ids[1]
        return self.answers.token(sequence.key, sequence.index)

    def _emit(self, sequence: _Sequence, token: int | None, finish: FinishReason | None) -> None:
        wanted = sequence.request.sampling.logprobs
        scores = None if token is None or wanted is None else token_scores(token, wanted)
        self._events.append(_event(sequence, token_id=token, finish=finish, logprob=scores))
        sequence.index += token is not None
        if finish is not None:
            self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.request.id]
        self._waiting.remove(sequence)
        self._reading = None if self._reading is sequence else self._reading


def _event(sequence: _Sequence, **content: Any) -> TokenEvent:
    request = sequence.request
    return TokenEvent(request_id=request.id, attempt=request.attempt, index=sequence.index, **content)


async def main(config: dict[str, Any]) -> None:
    """``config``: redis_url, model, rate, prefill, seats, lease_s."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop, model = asyncio.Event(), Path(config["model"])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    redis, spec = connect(config["redis_url"]), load_spec(model)
    worker = AttentionWorker(
        info=WorkerInfo(
            id=incarnation(),
            model="pocket",
            fingerprint=spec.fingerprint,
            kv_tokens=_CREDIT_TOKENS,
            max_num_seqs=config["seats"],
            max_model_len=spec.max_position,
            host="127.0.0.1",
            pid=os.getpid(),
            version="stand-in",
            wire=WIRE,
        ),
        engine=StandInEngine(answers=Answers.of(model), rate=config["rate"], prefill=config["prefill"]),
        queue=WorkerQueue(redis, Keys("expertmesh"), QueueLimits(lease_s=config["lease_s"])),
        clock=RedisClock(redis),
        options=WorkerOptions(
            credit_tokens=_CREDIT_TOKENS,
            credit_requests=config["seats"],
            lease_s=config["lease_s"],
            buffer_tokens=65_536,
            drain_s=1.0,
            step_timeout_s=300.0,
        ),
    )
    try:
        await worker.run(stop)
    finally:
        await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
