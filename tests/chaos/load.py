"""Concurrent REST streams, each answer known beforehand."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from testkit.pocket.answers import END

from loadgen.client import StreamResult, stream_completion
from loadgen.connections import Broken, Session, TimedOut

TRY_AGAIN = (429, 503)
PAUSE_S, STREAM_S = 0.2, 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A prompt and the greedy answer's first ``max_tokens`` tokens, without the end of the text."""

    prompt: str
    max_tokens: int
    token_ids: tuple[int, ...]

    @property
    def body(self) -> dict[str, Any]:
        asked = {"model": "pocket", "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0}
        return asked | {"return_token_ids": True}


def jobs(records: Sequence[Mapping[str, Any]], seed: int, shortest: int = 8, longest: int = 20) -> list[Job]:
    """Jobs of the recorded answers that are long enough, cut to a length drawn from ``shortest..longest``."""
    rng = random.Random(seed)
    found = []
    for record in records:
        count = rng.randint(shortest, longest)
        if len(ids := record["output_ids"]) >= shortest:
            found.append(Job(prompt=record["prompt"], max_tokens=count, token_ids=_without_end(ids[:count])))
    return found


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one client saw of one job, and what is wrong with it."""

    job: Job
    result: StreamResult
    refused: int
    fault: str | None = None


def judge(job: Job, result: StreamResult, text: str | None) -> str | None:
    """None for the expected answer, else ``lost``, ``doubled`` or ``changed`` and a word on it.

    ``text``: of the undisturbed run, None while that is made.
    """
    found, wanted = _without_end(result.token_ids), job.token_ids
    if result.status != 200 or result.error is not None or not result.whole:
        return f"lost: status {result.status}, {len(found)} of {len(wanted)} tokens, {result.error or 'no end'}"
    if found != wanted:
        kind = "lost" if len(found) < len(wanted) else "doubled" if len(found) > len(wanted) else "changed"
        return f"{kind}: {found} instead of {wanted}"
    if text is not None and result.text != text:
        return f"changed: text {result.text!r} instead of {text!r}"
    return None


@dataclass(kw_only=True, slots=True)
class Load:
    """``streams`` clients at once, each with one request after the other. ``silence_s``: they wait no longer for the
    next byte."""

    url: str
    streams: int
    silence_s: float | None = None
    texts: dict[Job, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0

    async def undisturbed(self, wanted: Sequence[Job]) -> list[Outcome]:
        """Run each job once, and remember the texts that later answers must equal."""
        todo = list(wanted)
        found = await self._clients(lambda: todo.pop() if todo else None)
        self.texts = {outcome.job: outcome.result.text for outcome in found}
        return found

    async def run(self, wanted: Sequence[Job], seed: int, until: Callable[[], bool]) -> list[Outcome]:
        """Random jobs until ``until``; those under way then end first."""
        rng = random.Random(seed)
        return await self._clients(lambda: None if until() else rng.choice(wanted))

    async def _clients(self, draw: Callable[[], Job | None]) -> list[Outcome]:
        self.outcomes = []
        async with Session(total_s=STREAM_S, connect_s=self.silence_s, silence_s=self.silence_s) as session:
            await asyncio.gather(*(self._client(session, draw) for _ in range(self.streams)))
        return self.outcomes

    async def _client(self, session: Session, draw: Callable[[], Job | None]) -> None:
        while (job := draw()) is not None:
            self.in_flight += 1
            outcome = await self._one(session, job)
            outcome.fault = judge(job, outcome.result, self.texts.get(job))
            self.outcomes.append(outcome)
            self.in_flight -= 1

    async def _one(self, session: Session, job: Job) -> Outcome:
        """A request that the server asks to send again later is sent again; what has begun is never."""
        begun, refused = time.perf_counter(), 0
        while True:
            result = StreamResult(started=time.perf_counter())
            try:
                result = await stream_completion(session, self.url, job.body)
            except (Broken, TimedOut) as error:
                result.error = f"{type(error).__name__}: {error}"
            pause_s = self.pause_s(result)
            if pause_s is None or time.perf_counter() > begun + STREAM_S:
                return Outcome(job=job, result=result, refused=refused)
            refused += 1
            await asyncio.sleep(pause_s)

    def pause_s(self, result: StreamResult) -> float | None:
        """After which the request is sent again; None if it is not."""
        return PAUSE_S if result.status in TRY_AGAIN else None


def _without_end(ids: Sequence[int]) -> tuple[int, ...]:
    """Some answers end with the token that ends a text, which has none."""
    return tuple(ids[:-1] if ids and ids[-1] == END else ids)


def faults_of(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How often each: lost, doubled, changed."""
    return Counter(outcome.fault.partition(":")[0] for outcome in outcomes if outcome.fault)
