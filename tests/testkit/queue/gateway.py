"""A simulated gateway that follows its stream as the queue's contract says, and the text that requests must get."""

from __future__ import annotations

import zlib

from msgspec import structs

from services.messages import AttemptLost, GenerateRequest, TokenEvent
from services.queue.gateway_side import FIRST_ID, GatewayQueue


def drawn(request_id: str, index: int) -> int:
    """The token that any worker draws there: a replay draws the same."""
    return zlib.crc32(f"{request_id}:{index}".encode()) % 1000


def text(request: GenerateRequest) -> list[int]:
    """All tokens of a request; one that divides by 9 stops it."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens.append(drawn(request.id, len(tokens)))
        if tokens[-1] % 9 == 0:
            break
    return tokens


class SimGateway:
    """Follows its stream as the contract asks of a gateway."""

    def __init__(self, queue: GatewayQueue, ends: dict[str, list[str]]) -> None:
        self.queue = queue
        self.ends = ends
        self.last_id = FIRST_ID
        self.live: dict[str, GenerateRequest] = {}
        self.doubts: set[tuple[str, str]] = set()

    def end(self, request_id: str, how: str) -> None:
        self.ends[request_id].append(how)
        del self.live[request_id]

    async def pump(self) -> None:
        self.last_id, events = await self.queue.follow(self.last_id, 0)
        for event in events:
            request = self.live.get(event.request_id)
            if request is None:
                await self.queue.cancel([event.request_id])
            elif isinstance(event, AttemptLost):
                if event.attempt > request.attempt:
                    await self.again(request, event.attempt)
            elif event.attempt >= request.attempt:
                await self.take(request, event)

    async def take(self, request: GenerateRequest, event: TokenEvent) -> None:
        if event.token_id is None:
            return self.end(request.id, event.error.code if event.error else str(event.finish))
        if event.index > request.delivered:
            attempt = await self.queue.resync(request.id, event.attempt)
            return await self.again(request, attempt) if attempt else self.end(request.id, "gone")
        assert event.token_id == drawn(request.id, event.index)
        if event.index == request.delivered:
            self.live[request.id] = structs.replace(request, token_ids=[*request.token_ids, event.token_id])
        if event.finish:
            assert self.live[request.id].token_ids[request.prompt_len :] == text(request)
            self.end(request.id, event.finish)
        return None

    async def again(self, request: GenerateRequest, attempt: int) -> None:
        self.live[request.id] = structs.replace(self.live[request.id], attempt=attempt)
        await self.queue.resubmit(self.live[request.id])

    async def survey(self) -> None:
        answer = await self.queue.survey({request.id: request.attempt for request in self.live.values()})
        doubts = {(request_id, state) for request_id, (state, _) in answer.items() if state in ("done", "moved")}
        for request_id, (state, attempt) in answer.items():
            request = self.live[request_id]
            if state == "missing" or (state not in ("done", "moved") and attempt < request.attempt):
                await self.again(request, request.attempt)
            elif state == "lost":
                await self.again(request, attempt)
            elif (request_id, state) in doubts & self.doubts:
                later = await self.queue.resync(request_id, request.attempt, retake=state == "moved")
                await self.again(request, later) if later else self.end(request_id, "gone")
        self.doubts = doubts
