"""A gateway without HTTP: admits requests, follows its result stream, resubmits what was lost, checks every index."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs
from redis.asyncio import Redis

from services.errors import QueueUnavailable
from services.messages import AttemptLost, GenerateRequest, ResultEvent, SamplingParams, TokenEvent
from services.queue.gateway_side import FIRST_ID, GatewayQueue
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from services.runtime.tasks import end_tasks
from testkit.models.stepping import continuation


@dataclass
class Stream:
    """What a client of one request has seen. ``doubled`` counts tokens that came twice and were dropped."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    end: TokenEvent | None = None
    doubled: int = 0
    lost: list[AttemptLost] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)


async def finish(streams: Sequence[Stream], timeout_s: float = 60) -> None:
    """Wait for the end of each."""
    async with asyncio.timeout(timeout_s):
        for stream in streams:
            await stream.ended.wait()


def check(streams: Sequence[Stream], count: int) -> None:
    """Each has its ``count`` tokens, those of :class:`testkit.models.stepping.SteppingEngine`."""
    for stream in streams:
        assert stream.end is not None
        assert (stream.end.finish, stream.end.error) == ("length", None)
        assert stream.tokens == continuation(stream.request.token_ids[: stream.request.prompt_len], count)


class Client:
    """Use as an async context manager. ``rest_s``: how long it rests after each read."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits, *, lease_s: float) -> None:
        self.incarnation = f"gateway-{uuid.uuid4().hex[:6]}"
        self.queue = GatewayQueue(redis, keys, self.incarnation, limits)
        self.streams: dict[str, Stream] = {}
        self.rest_s = 0.0
        self._lease_s = lease_s
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Client:
        await self.queue.heartbeat(self._lease_s)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._tasks)

    async def submit(self, *prompts: list[int], max_tokens: int = 8, timeout_s: float = 60) -> list[Stream]:
        requests = [
            GenerateRequest(
                id=uuid.uuid4().hex,
                attempt=1,
                token_ids=list(prompt),
                prompt_len=len(prompt),
                sampling=SamplingParams(max_tokens=max_tokens),
                deadline_ms=0,
                priority=5,
                tenant="tenant",
                reply_to=self.incarnation,
            )
            for prompt in prompts
        ]
        streams = [Stream(request) for request in requests]
        self.streams |= {stream.request.id: stream for stream in streams}
        for stream, request in zip(streams, await self.queue.admit(requests, timeout_s=timeout_s), strict=True):
            stream.request = request
        return streams

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            with contextlib.suppress(QueueUnavailable):
                await self.queue.heartbeat(self._lease_s)

    async def _follow(self) -> None:
        last_id = FIRST_ID
        while True:
            try:
                last_id, events = await self.queue.follow(last_id, 500)
            except QueueUnavailable:
                await asyncio.sleep(0.02)
                continue
            for event in events:
                await self._take(event)
            await asyncio.sleep(self.rest_s)

    async def _take(self, event: ResultEvent) -> None:
        stream = self.streams[event.request_id]
        if isinstance(event, AttemptLost):
            stream.lost.append(event)
            await self._resubmit(stream, event.attempt)
            return
        assert stream.end is None or event.index < len(stream.tokens), f"after the end: {event}"
        if event.token_id is not None:
            assert event.index <= len(stream.tokens), f"gap before {event}"
            if event.index == len(stream.tokens):
                stream.tokens.append(event.token_id)
                stream.first_token.set()
            else:
                assert stream.tokens[event.index] == event.token_id, f"another draw: {event}"
                stream.doubled += 1
        if event.finish is not None:
            stream.end = event
            stream.ended.set()

    async def _resubmit(self, stream: Stream, attempt: int) -> None:
        request = stream.request
        stream.request = structs.replace(
            request, attempt=attempt, token_ids=[*request.token_ids[: request.prompt_len], *stream.tokens]
        )
        assert await self.queue.resubmit(stream.request)
