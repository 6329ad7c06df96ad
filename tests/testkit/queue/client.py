"""Clients of a gateway that runs; what the queue sends to it is checked event by event."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from services.errors import RequestError
from services.gateway.job import Choice, Job
from services.messages import AttemptLost, FinishReason, GenerateRequest, SamplingParams, TokenEvent
from services.queue.gateway_side import GatewayQueue, Result
from services.queue.keys import Keys
from services.queue.limits import QueueLimits
from testkit.models.stepping import continuation
from testkit.processes.background import ended
from testkit.queue.gateway import Gateway


@dataclass
class Stream:
    """One request: what its client got, and what the queue sent for it. ``doubled`` counts tokens that came twice."""

    job: Job | None = None
    sent: list[int] = field(default_factory=list)
    over: bool = False
    doubled: int = 0
    lost: list[AttemptLost] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def choice(self) -> Choice:
        assert self.job is not None
        return self.job.choices[0]

    @property
    def request(self) -> GenerateRequest:
        return self.choice.request

    @property
    def tokens(self) -> list[int]:
        return self.choice.generated.tolist()

    @property
    def finish(self) -> FinishReason | None:
        return self.choice.finish

    @property
    def error(self) -> RequestError | None:
        return self.choice.error

    def hear(self, event: Result) -> None:
        if isinstance(event, AttemptLost):
            assert not self.over, f"after the end: {event}"
            self.lost.append(event)
            return
        assert isinstance(event, TokenEvent)
        assert not self.over or event.index < len(self.sent), f"after the end: {event}"
        if event.token_id is not None:
            assert event.index <= len(self.sent), f"gap before {event}"
            if event.index == len(self.sent):
                self.sent.append(event.token_id)
                self.first_token.set()
            else:
                assert self.sent[event.index] == event.token_id, f"another draw: {event}"
                self.doubled += 1
        self.over = self.over or event.finish is not None


async def finish(streams: Sequence[Stream], timeout_s: float = 60) -> None:
    """Wait for the end of each."""
    async with asyncio.timeout(timeout_s):
        for stream in streams:
            await stream.ended.wait()


def check(streams: Sequence[Stream], count: int) -> None:
    """Each has its ``count`` tokens, those of :class:`testkit.models.stepping.SteppingEngine`."""
    for stream in streams:
        assert (stream.finish, stream.error) == ("length", None)
        assert stream.tokens == stream.sent == continuation(stream.choice.prompt.tolist(), count)


async def complete(streams: Sequence[Stream], count: int) -> None:
    """Wait for the end of each, and check that it has its ``count`` tokens."""
    await finish(streams)
    check(streams, count)


class Client(Gateway):
    """Use as an async context manager. ``rest_s``: how long it rests after each read."""

    def __init__(self, redis: Redis, keys: Keys, limits: QueueLimits, *, lease_s: float) -> None:
        self.incarnation = f"gateway-{uuid.uuid4().hex[:6]}"
        self.streams: defaultdict[str, Stream] = defaultdict(Stream)  # events may come before the queue's reply
        self.rest_s = 0.0
        queue = GatewayQueue(redis, keys, self.incarnation, limits)
        super().__init__(queue, lease_s=lease_s, hear=lambda event: self.streams[event.request_id].hear(event))

    async def __aenter__(self) -> Client:
        self._running = asyncio.create_task(self.follower.run())
        while not self.follower.up:
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended([self._running])

    async def _follow(self, last_id: str, block_ms: int) -> tuple[str, list[Result]]:
        await asyncio.sleep(self.rest_s)
        return await super()._follow(last_id, block_ms)

    async def submit(self, *prompts: list[int], max_tokens: int = 8, timeout_s: float = 60) -> list[Stream]:
        """Asks for a continuation of each of ``prompts``, all at once."""
        return await asyncio.gather(*(self._submit(prompt, max_tokens, timeout_s) for prompt in prompts))

    async def _submit(self, prompt: list[int], max_tokens: int, timeout_s: float) -> Stream:
        request = GenerateRequest(
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
        stream = self.streams[request.id]
        stream.job = await self.admit(request, timeout_s=timeout_s)
        stream.job.when_done(stream.ended.set)
        return stream
