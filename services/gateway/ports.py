"""The queue as the gateway needs it. ``services.queue.GatewayQueue`` implements it and documents each call."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from services.messages import GenerateRequest, WorkerInfo
from services.queue.gateway_side import IdempotencyKey, Prompts, RequestState, Result
from services.queue.limits import TenantLimits


class Queue(Protocol):
    """All calls raise :class:`QueueUnavailable` while Redis is away, and may then be repeated."""

    async def heartbeat(self, ttl_s: float, fingerprint: str | None = None) -> None: ...

    async def leave(self) -> None: ...

    async def admit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        timeout_s: float,
        tenant_limits: TenantLimits | None = None,
        key: IdempotencyKey | None = None,
        prompts: Prompts | None = None,
    ) -> list[GenerateRequest]: ...

    async def charge(self, tenant: str, limits: TenantLimits) -> None: ...

    async def resubmit(
        self, request: GenerateRequest, prompts: Prompts | None = None, *, by_name: bool = True
    ) -> bool: ...

    async def take_up(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float,
        tenant_limits: TenantLimits | None = None,
        prompts: Prompts | None = None,
        place: int = 0,
        of: int = 1,
    ) -> GenerateRequest: ...

    async def resync(self, request_id: str, attempt: int, *, retake: bool = False) -> int | None: ...

    async def cancel(self, request_ids: Iterable[str], delivered: Mapping[str, int] | None = None) -> int: ...

    async def survey(self, attempts: Mapping[str, int]) -> dict[str, tuple[RequestState, int]]: ...

    async def follow(self, last_id: str, block_ms: int) -> tuple[str, list[Result]]: ...

    async def look(self) -> list[WorkerInfo]: ...

    async def restate(self, sequences: Iterable[tuple[GenerateRequest, array[int]]]) -> int: ...
