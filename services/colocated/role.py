"""The colocated role: an attention worker with a seat of its own, on one device. Needs Redis and a model.

The seat is one as others: it holds what the scheduler gives it, answers every attention worker, and other seats answer
this one. So workers of this kind come, go and die one by one, beside each other and beside expert workers.
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
from services.queue.role_service import RoleService, run_role_service
from services.runtime import run_role
from services.runtime.tasks import end_tasks, first_done

DEREGISTER_S = 2.0
"""For a seat whose attention has failed: others learn at once that it is gone, not when its lease expires."""

log = logging.getLogger(__name__)


async def run_both(attention: RoleService, experts: RoleService, metrics_url: str, stop: asyncio.Event) -> None:
    """Both until ``stop``. The seat leaves last: what attention has to end needs it, and the others may, too.

    What ends one of them by an error ends both; the seat still deregisters. One that the scheduler wants gone leaves
    attention here.
    """
    leave = asyncio.Event()
    holding = asyncio.ensure_future(experts.run(metrics_url, leave))
    attending = asyncio.ensure_future(attention.run(metrics_url, stop))
    try:
        await first_done(holding, attending)
        if holding.done():
            log.info("the seat was given up; attention goes on")
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
    """Everything around both. ``registry`` gets the series of both."""

    def __init__(self, settings: Settings, redis: Redis, registry: CollectorRegistry) -> None:
        self._attention = AttentionService(settings, redis, registry, colocated=True)
        self._experts = ExpertsRole(settings, redis, registry, beside_attention=True)

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Load, serve until ``stop``, drain."""
        await run_both(self._attention, self._experts, metrics_url, stop)

    def missing(self) -> list[str]:
        """What keeps it from serving; for /ready."""
        return list(dict.fromkeys([*self._experts.missing(), *self._attention.missing()]))


def load_kernels_early(environment: MutableMapping[str, str]) -> None:
    """All kernels of torch with CUDA's context, and not each at its first use, unless ``environment`` says otherwise:
    loading one waits for kernels under way, and these here for rows that are to be launched behind it."""
    environment.setdefault("CUDA_MODULE_LOADING", "EAGER")


async def colocate(settings: Settings, stop: asyncio.Event) -> None:
    """Run attention and experts until ``stop``; then drain."""
    settings = colocated(settings)
    load_kernels_early(os.environ)
    await run_role_service(settings, stop, partial(ColocatedRole, settings))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the role."""
    return run_role(COLOCATED, colocate, argv)
