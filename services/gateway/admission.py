"""Puts a job into the queue. In: a :class:`Job` that nobody waits for. Out: its sequences in the queue and in the table
of jobs in flight."""

from __future__ import annotations

import logging

from services.errors import InternalError, QueueUnavailable, RequestError
from services.gateway.idempotency import Origin
from services.gateway.job import Job
from services.gateway.ports import Queue
from services.gateway.results import ResultFollower
from services.gateway.table import JobTable
from services.messages import GenerateRequest
from services.queue.limits import TenantLimits
from services.request_ids import about

log = logging.getLogger(__name__)


class Admission:
    """Admits jobs, whose requests may wait and run for ``timeout_s``."""

    def __init__(self, queue: Queue, table: JobTable, follower: ResultFollower, *, timeout_s: float) -> None:
        self._queue = queue
        self._table = table
        self._follower = follower
        self._timeout_s = timeout_s

    async def admit(self, job: Job, origin: Origin, limits: TenantLimits | None) -> None:
        """Admits ``job``, or takes it up where the queue may know it. Its events may come before the queue's reply, so
        it enters the table first. Raises as ``GatewayQueue.admit``."""
        if origin.resumed:
            await self._follower.cancels_heard({choice.request.id for choice in job.choices})
        self._table.add(job)
        try:
            granted = await self._enqueue(job, origin, limits)
        except BaseException as error:
            self._table.discard(job)
            _end_traces(job, error)
            if not isinstance(error, Exception) or isinstance(error, QueueUnavailable) or origin.resumed:
                # The call may have taken effect, at least in part.
                self._follower.cancel({choice.request.id: 0 for choice in job.choices})
            raise
        for choice, request in zip(job.choices, granted, strict=True):
            if request.attempt >= choice.request.attempt and choice.finish is None:
                choice.grant(request)
        job.admitted = True
        if log.isEnabledFor(logging.DEBUG):
            for choice in job.choices:
                request = choice.request
                ids = about(request.id, request.attempt, job.tenant, traceparent=request.traceparent)
                log.debug("admitted", extra=ids)

    async def _enqueue(self, job: Job, origin: Origin, limits: TenantLimits | None) -> list[GenerateRequest]:
        requests, prompts = [choice.request for choice in job.choices], job.prompts
        if not origin.resumed:
            return await self._queue.admit(
                requests, timeout_s=self._timeout_s, tenant_limits=limits, key=origin.key, prompts=prompts
            )
        count, timeout_s = len(requests), self._timeout_s
        return [
            await self._queue.take_up(
                request, timeout_s=timeout_s, tenant_limits=limits, prompts=prompts, place=place, of=count
            )
            for place, request in enumerate(requests)
        ]


def _end_traces(job: Job, error: BaseException) -> None:
    """End the attempts of a job that was not admitted."""
    refusal = error if isinstance(error, RequestError) else InternalError("The request was not admitted.")
    for choice in job.choices:
        if choice.trace is not None:
            choice.trace.end("error", refusal, 0)
