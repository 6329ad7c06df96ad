"""The colocated role: an attention worker and an expert worker in one process, on one device. Needs Redis and a model.

The expert worker's seat is like any other: the scheduler chooses its group, it answers every attention worker, and this
attention worker uses all seats. So colocated workers come, go and die one by one, together with expert workers or not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import MutableMapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.attention.service import AttentionService
from services.config import COLOCATED, Settings, colocated
from services.experts.role import ExpertsRole
from services.model.hub import with_checkpoint
from services.queue.role_service import RoleService, run_role_service
from services.runtime import run_role
from services.runtime.tasks import end_tasks, first_done
from services.runtime.tracing import Tracer, tracing

DEREGISTER_S = 2.0
"""How long a seat whose attention has failed may take to deregister, before its lease has to expire."""

log = logging.getLogger(__name__)


async def run_both(attention: RoleService, experts: RoleService, metrics_url: str, stop: asyncio.Event) -> None:
    """Run both until ``stop``. The seat leaves last: requests that attention still has to end need it.

    An error of one ends both; the seat still deregisters. If the scheduler ends the seat, attention stays.
    """
    leave = asyncio.Event()
    holding = asyncio.ensure_future(experts.run(metrics_url, leave))
    attending = asyncio.ensure_future(attention.run(metrics_url, stop))
    try:
        await first_done(holding, attending)
        if holding.done():
            log.info("gave up the expert seat; attention continues")
        await attending
        leave.set()
        await holding
    except Exception:
        leave.set()
        await asyncio.wait({holding}, timeout=DEREGISTER_S)
        raise
    finally:
        await end_tasks([holding, attending])


class ColocatedRole:
    """An attention worker and an expert worker. ``registry`` gets the series of both."""

    def __init__(
        self, settings: Settings, redis: Redis, registry: CollectorRegistry, *, tracer: Tracer | None = None
    ) -> None:
        self._experts = ExpertsRole(settings, redis, registry, colocated=True, tracer=tracer)
        self._attention = AttentionService(
            settings, redis, registry, colocated=True, experts_loaded=self._experts.loaded, tracer=tracer
        )

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Load, serve until ``stop``, drain."""
        await run_both(self._attention, self._experts, metrics_url, stop)

    def missing(self) -> list[str]:
        """Return the names of things that either worker waits for; for /ready."""
        return list(dict.fromkeys([*self._experts.missing(), *self._attention.missing()]))


def load_kernels_early(environment: MutableMapping[str, str]) -> None:
    """Let torch load all kernels at the start, not each at its first use, unless ``environment`` says otherwise:
    loading waits for running kernels, and these may wait for rows that are launched after it."""
    environment.setdefault("CUDA_MODULE_LOADING", "EAGER")


async def colocate(settings: Settings, stop: asyncio.Event) -> None:
    """Run attention and experts until ``stop``; then drain."""
    settings = colocated(settings)
    load_kernels_early(os.environ)
    with tracing(settings, COLOCATED) as tracer:
        await run_role_service(COLOCATED, settings, stop, partial(ColocatedRole, settings, tracer=tracer))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the role."""
    return run_role(COLOCATED, colocate, argv, prepare=with_checkpoint)
