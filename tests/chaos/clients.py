"""Clients of several gateways: each request has an Idempotency-Key, by which its client takes it up where one broke."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from chaos.history import History
from chaos.load import PAUSE_S, STREAM_S, TRY_AGAIN, Job, Load, Outcome
from loadgen.client import StreamResult, stream_completion
from loadgen.connections import Broken, Session, TimedOut

Fate = Literal["end", "refused", "broken", "failed"]


def fate(result: StreamResult, *, broken: bool) -> Fate:
    """What became of one try. ``broken``: the connection did not come about, or was lost."""
    if broken:
        return "broken" if result.status == 200 else "refused"
    if result.status == 200 and result.error is None:
        return "end" if result.whole else "broken"
    return "refused" if result.status in TRY_AGAIN else "failed"


@dataclass(slots=True)
class _Request:
    """A request's tries. What comes of them goes into the history at once."""

    history: History
    key: str
    result: StreamResult
    """Of this try."""
    brought: int = 0
    """Tokens of this try."""
    known: int = 0
    """Tokens of all tries."""
    started: float = 0.0
    """When the try began that brought the first token."""
    times: list[float] = field(default_factory=list)
    """When tokens came that were new."""

    def begin(self) -> None:
        self.result, self.brought = StreamResult(started=time.perf_counter()), 0

    def on_progress(self, result: StreamResult) -> None:
        if result is not self.result:
            self.result = result
            self.history.add("admitted", key=self.key, status=result.status)
        if ids := tuple(result.token_ids[self.brought :]):
            self.history.add("tokens", key=self.key, index=self.brought, ids=ids)
            self.brought += len(ids)
        if self.brought > self.known:
            self.started = self.started if self.known else result.started
            self.known = self.brought
            self.times.append(result.chunk_times[-1])

    def outcome(self, job: Job, refused: int) -> Outcome:
        """With the times of all tries."""
        if self.times:
            self.result.started, self.result.chunk_times = self.started, self.times
        return Outcome(job=job, result=self.result, refused=refused)


@dataclass(kw_only=True, slots=True)
class KeyedLoad(Load):
    """Each client begins at the gateway of its number, and goes to the next one when a connection breaks or stays
    silent."""

    urls: Sequence[str]
    history: History
    numbers: dict[Job, int] = field(default_factory=dict)
    clients: dict[object, int] = field(default_factory=dict)
    """By task."""

    def expect(self, answers: Sequence[Outcome]) -> None:
        """Write the answers that all requests from now on must get."""
        for number, answer in enumerate(answers):
            self.numbers[answer.job] = number
            result = answer.result
            facts = {"ids": tuple(result.token_ids), "text": result.text, "finish": str(result.finish_reason)}
            self.history.add("answer", job=number, **facts)

    async def _one(self, session: Session, job: Job) -> Outcome:
        begun, refused = time.perf_counter(), 0
        client = self.clients.setdefault(asyncio.current_task(), len(self.clients))
        place = client
        request = _Request(self.history, uuid.uuid4().hex, StreamResult(started=begun))
        self.history.add("invoke", key=request.key, client=client, job=self.numbers[job])
        while True:
            became = await self._try(session, job, self.urls[place % len(self.urls)], request)
            if became != "end" and time.perf_counter() > begun + STREAM_S:
                became = "failed"
            result = request.result
            facts = {"status": result.status, "finish": str(result.finish_reason)}
            self.history.add(became, key=request.key, text=result.error or result.text, **facts)
            if became in ("end", "failed"):
                return request.outcome(job, refused)
            refused += became == "refused"
            place += became == "broken" or result.status == 0
            await asyncio.sleep(PAUSE_S)

    async def _try(self, session: Session, job: Job, url: str, request: _Request) -> Fate:
        request.begin()
        headers = {"Idempotency-Key": request.key}
        try:
            request.result = await stream_completion(
                session, url, job.body, headers=headers, on_progress=request.on_progress
            )
        except (Broken, TimedOut) as error:
            request.result.error = f"{type(error).__name__}: {error}"
            return fate(request.result, broken=True)
        return fate(request.result, broken=False)
