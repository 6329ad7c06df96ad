"""Clients who mean well, in a process of their own: streams that verify each token and note how long they waited.

Half of the streams last, the other half are short and come again. What begins and does not run through, or says
anything but what the prompt's answer is, is a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from testkit.processes.background import ended

from abuse.kit.child import OwnLag, obey
from abuse.kit.tokens import Answers

SHORT_TOKENS = 50
PROMPT_TOKENS = 40
_PAUSE_S = 0.3


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


class Fault(Exception):
    """What an honest client did not deserve."""


@dataclass(kw_only=True, slots=True)
class _Stream:
    """One request under way. ``last``: when its last token came, or when it was sent."""

    tenant: str
    key: int
    count: int
    last: float
    index: int = 0


@dataclass(kw_only=True)
class Crowd:
    """``keys``: tenant -> API key; streams are dealt out to them in turn."""

    url: str
    keys: dict[str, str]
    streams: int
    short: bool
    long_tokens: int
    answers: Answers
    lag: OwnLag = field(default_factory=OwnLag)
    gaps: list[tuple[float, float, str]] = field(default_factory=list)
    first: list[tuple[float, float]] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    refused: list[tuple[float, str]] = field(default_factory=list)
    under_way: dict[int, _Stream] = field(default_factory=dict)
    tokens: int = 0
    ended: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(5))

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await asyncio.gather(self.lag.run(), *(self._client(session, number) for number in range(self.streams)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        tenant = list(self.keys)[number % len(self.keys)]
        long = not self.short or number // len(self.keys) % 2 == 0
        await asyncio.sleep(0.05 * number)
        while True:
            try:
                await self._one(session, number, tenant, self.long_tokens if long else SHORT_TOKENS)
                self.ended += 1
            except (aiohttp.ClientError, TimeoutError, Fault) as error:
                self.faults.append((time.monotonic(), f"{tenant}: {type(error).__name__}: {error}"[:300]))
                await asyncio.sleep(_PAUSE_S)
            finally:
                self.under_way.pop(number, None)

    async def _one(self, session: aiohttp.ClientSession, number: int, tenant: str, count: int) -> None:
        prompt = [self.draw.randrange(300, 8000) for _ in range(PROMPT_TOKENS)]
        stream = _Stream(tenant=tenant, key=self.answers.key(prompt), count=count, last=time.monotonic())
        self.under_way[number] = stream
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        async with session.post(
            f"{self.url}/v1/completions", json=body | {"return_token_ids": True}, headers=headers
        ) as response:
            if response.status in (429, 503):
                self.refused.append((time.monotonic(), f"{tenant}: {(await response.text())[:200]}"))
                await asyncio.sleep(_PAUSE_S)
                return
            if response.status != 200:
                raise Fault(f"status {response.status}: {(await response.text())[:200]}")
            await self._follow(response, stream)

    async def _follow(self, response: aiohttp.ClientResponse, stream: _Stream) -> None:
        pending, finish, done = b"", None, False
        async for data in response.content.iter_any():
            *events, pending = (pending + data).split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    done = True
                elif event.startswith(b"data: "):
                    finish = self._take(msgspec.json.decode(event[6:], type=_Chunk), stream) or finish
        if finish != "length" or not done or stream.index != stream.count:
            raise Fault(f"ended after {stream.index} of {stream.count} tokens: {finish}, done {done}")

    def _take(self, chunk: _Chunk, stream: _Stream) -> str | None:
        if chunk.error is not None:
            raise Fault(f"after {stream.index} tokens: {chunk.error.get('code')}: {chunk.error.get('message')}")
        finish = None
        for choice in chunk.choices:
            if choice.token_ids:
                self._note_wait(stream)
            wanted = [self.answers.token(stream.key, stream.index + i) for i in range(len(choice.token_ids))]
            text = "".join(self.answers.text(stream.key, stream.index + i) for i in range(len(choice.token_ids)))
            if choice.token_ids != wanted or choice.text != text:
                raise Fault(f"changed at {stream.index}: {choice.token_ids} {choice.text!r}, not {wanted} {text!r}")
            stream.index += len(wanted)
            self.tokens += len(wanted)
            finish = choice.finish_reason or finish
        return finish

    def _note_wait(self, stream: _Stream) -> None:
        now = time.monotonic()
        waited = now - stream.last - self.lag.within(stream.last, now)
        if stream.index:
            self.gaps.append((now, waited, stream.tenant))
        else:
            self.first.append((now, waited))
        stream.last = now

    async def report(self, since: float, until: float) -> dict[str, Any]:
        """What was seen between two times of ``time.monotonic``; waits that have not ended count as they stand."""
        now = time.monotonic()
        gaps = sorted(gap for at, gap, _ in self.gaps if since <= at <= until)
        open_gaps = [now - stream.last for stream in self.under_way.values() if stream.index]
        first = [wait for at, wait in self.first if since <= at <= until]
        first += [now - stream.last for stream in self.under_way.values() if not stream.index]
        return {
            "streams": len(self.under_way),
            "started": sum(stream.index > 0 for stream in self.under_way.values()),
            "tokens": len(gaps),
            "p50": gaps[len(gaps) // 2] if gaps else None,
            "p99": gaps[int(len(gaps) * 0.99)] if gaps else None,
            "longest": max([*gaps[-1:], *open_gaps], default=None),
            "first": max(first, default=None),
            "faults": [what for at, what in self.faults if since <= at <= until],
            "refused": [what for at, what in self.refused if since <= at <= until],
            "own_lag": self.lag.within(since, until),
            "all_tokens": self.tokens,
            "ended": self.ended,
        }


async def main(config: dict[str, Any]) -> None:
    answers = Answers.of(Path(config.pop("model")))
    crowd = Crowd(answers=answers, **config)
    running = asyncio.create_task(crowd.run())
    try:
        await obey({"report": crowd.report})
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await ended([running])


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
