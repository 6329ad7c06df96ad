"""A gateway without HTTP and text: its own table, admission and follower over any queue, which tests drive by steps."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

from msgspec import structs
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models

from services.gateway.admission import Admission
from services.gateway.budget import Holdings
from services.gateway.idempotency import Origin
from services.gateway.job import Choice, Job, Rendering
from services.gateway.results import ResultFollower
from services.gateway.table import JobTable
from services.gateway.targets import LatencyTargets
from services.gateway.tokenizer import SpecialTokens, TextCodec
from services.messages import GenerateRequest
from services.metrics import GatewayMetrics
from services.queue.gateway_side import Result
from services.queue.prompts import pack_ids, prompt_name
from services.wire import WIRE


@cache
def _no_text() -> TextCodec:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer, SpecialTokens())


def _job(requests: tuple[GenerateRequest, ...]) -> Job:
    choices = []
    for index, request in enumerate(requests):
        prompt = array("i", request.token_ids[: request.prompt_len])
        name = prompt_name(request.tenant, pack_ids(prompt))
        named = structs.replace(request, attempt=1, token_ids=[], prompt=name, wire=WIRE)
        choices.append(Choice(index, named, prompt, _no_text(), Rendering()))
    return Job(
        job_id=requests[0].id, choices=choices, n=1, tenant=requests[0].tenant, created=0, arrived=time.monotonic()
    )


class Gateway:
    """Of what a gateway does by itself, ``follower.run()`` is begun by whoever wants it. ``hear`` gets each result
    before the follower does."""

    def __init__(
        self,
        queue: Any,
        *,
        lease_s: float = 600.0,
        own_lease_s: float | None = None,
        hear: Callable[[Result], None] | None = None,
    ) -> None:
        metrics = GatewayMetrics(CollectorRegistry())
        self.queue = queue
        self.table = JobTable(metrics, LatencyTargets(metrics, ttft_s=2.0, tpot_s=0.1), Holdings(1 << 30))
        self.follower = ResultFollower(
            queue,
            self.table,
            metrics,
            lease_s=lease_s,
            own_lease_s=lease_s if own_lease_s is None else own_lease_s,
            request_timeout_s=3600,
        )
        self._hear = hear
        self._read, queue.follow = queue.follow, self._follow

    async def _follow(self, last_id: str, block_ms: int) -> tuple[str, list[Result]]:
        last_id, events = await self._read(last_id, block_ms)
        for event in events if self._hear else ():
            self._hear(event)
        return last_id, events

    @property
    def live(self) -> dict[str, Choice]:
        """The sequences that wait for their ends, by id."""
        return {choice.request.id: choice for _, choice in self.table.waiting()}

    async def admit(self, *requests: GenerateRequest, timeout_s: float = 3600, resumed: bool = False) -> Job:
        """Puts ``requests``, which hold their prompts, into the queue as one job, or takes it up there."""
        job = _job(requests)
        origin = Origin(base_id=job.id, seed=0, resumed=resumed)
        await Admission(self.queue, self.table, self.follower, timeout_s=timeout_s).admit(job, origin, None)
        return job

    async def pump(self) -> None:
        """Reads once, and makes the calls that follow from it."""
        await self.follower._read(0)
        await self.finish_calls()

    async def survey(self) -> None:
        await self.follower._heartbeat()
        await self.follower._survey()
        await self.finish_calls()

    async def abandon(self, job: Job) -> None:
        """The client leaves."""
        self.follower.abandon(job)
        await self.finish_calls()

    async def finish_calls(self) -> None:
        while tasks := set(self.follower._tasks):
            await asyncio.gather(*tasks)
