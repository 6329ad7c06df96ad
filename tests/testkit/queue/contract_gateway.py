"""A gateway of a few lines that follows its stream as the queue's contract says, one call after the other.

A test can so leave it between any two calls; the follower of the product (:mod:`testkit.queue.gateway`) makes several
at once.
"""

from __future__ import annotations

from msgspec import structs

from services.messages import AttemptLost, GenerateRequest, TokenEvent
from services.queue.gateway_side import FIRST_ID, GatewayQueue
from testkit.queue.world import drawn, text


class SimGateway:
    """Follows its stream as the contract asks of a gateway. What it waits for (``live``) may change during any call:
    clients leave."""

    def __init__(self, queue: GatewayQueue, ends: dict[str, list[str]]) -> None:
        self.queue = queue
        self.ends = ends
        self.last_id = FIRST_ID
        self.live: dict[str, GenerateRequest] = {}
        self.clients: dict[str, object] = {}
        """Who waits for each. Whoever comes back is another client: what was asked for the former is not about it."""
        self.doubts: set[tuple[str, str]] = set()

    def wait_for(self, request: GenerateRequest) -> None:
        self.live[request.id], self.clients[request.id] = request, object()

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
                    await self.again(request.id, event.attempt)
            elif event.attempt >= request.attempt:
                await self.take(request, event)

    async def take(self, request: GenerateRequest, event: TokenEvent) -> None:
        if event.token_id is None and event.finish != "cancelled":
            return self.end(request.id, event.error.code if event.error else str(event.finish))
        if event.token_id is None or event.index > request.delivered:
            return await self.resync(request.id, event.attempt)
        assert event.token_id == drawn(request.id, event.index)
        if event.index == request.delivered:
            self.live[request.id] = structs.replace(request, token_ids=[*request.token_ids, event.token_id])
        if event.finish:
            assert self.live[request.id].token_ids[request.prompt_len :] == text(request)
            self.end(request.id, event.finish)
        return None

    async def resync(self, request_id: str, attempt: int, *, retake: bool = False) -> None:
        client = self.clients[request_id]
        later = await self.queue.resync(request_id, attempt, retake=retake)
        if self.clients[request_id] is not client:
            return
        if later:
            await self.again(request_id, later)
        elif request_id in self.live:
            self.end(request_id, "gone")

    async def again(self, request_id: str, attempt: int) -> None:
        if request_id in self.live:
            self.live[request_id] = structs.replace(self.live[request_id], attempt=attempt)
            await self.queue.resubmit(self.live[request_id])

    async def survey(self) -> None:
        clients = dict(self.clients)
        answer = await self.queue.survey({request.id: request.attempt for request in self.live.values()})
        doubts = {(request_id, state) for request_id, (state, _) in answer.items() if state in ("done", "moved")}
        for request_id, (state, attempt) in answer.items():
            if (request := self.live.get(request_id)) is None or self.clients[request_id] is not clients[request_id]:
                continue
            if state == "missing" or (state not in ("done", "moved") and attempt < request.attempt):
                await self.again(request_id, request.attempt)
            elif state == "lost":
                await self.again(request_id, attempt)
            elif (request_id, state) in doubts & self.doubts:
                await self.resync(request_id, request.attempt, retake=state == "moved")
        self.doubts = doubts
