"""``python -m services.colocated``: an attention worker with a seat of its own, on one device. Needs Redis and a model.

The seat is one as others: it holds what the scheduler gives it, answers every attention worker, and other seats answer
this one. So workers of this kind come, go and die one by one, beside each other and beside expert workers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from services.attention.__main__ import AttentionRole
from services.config import COLOCATED, Settings, colocated
from services.experts.__main__ import ExpertsRole
from services.queue.connect import check_access, connect
from services.queue.tasks import end_tasks
from services.runtime import MetricsServer, run_role, scrape_url

FAREWELL_S = 2.0
"""For a seat whose attention has failed: others learn at once that it is gone, not when its lease expires."""

log = logging.getLogger(__name__)


async def run_both(attention: AttentionRole, experts: ExpertsRole, metrics_url: str, stop: asyncio.Event) -> None:
    """Both until ``stop``. The seat leaves last: what attention has to end needs it, and the others may, too.

    What ends one of them by an error ends both; the seat still says farewell. One that the scheduler wants gone leaves
    attention here.
    """
    leave = asyncio.Event()
    holding = asyncio.ensure_future(experts.run(metrics_url, leave))
    attending = asyncio.ensure_future(attention.run(metrics_url, stop))
    tasks: list[asyncio.Future[Any]] = [holding, attending]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if holding.done():
            holding.result()
            log.info("the seat was given up; attention goes on")
        try:
            await attending
        except Exception:
            leave.set()
            await asyncio.wait({holding}, timeout=FAREWELL_S)
            raise
        leave.set()
        await holding
    finally:
        await end_tasks(tasks)


async def colocate(settings: Settings, stop: asyncio.Event) -> None:
    """Run attention and experts until ``stop``; then drain."""
    assert settings.redis_url is not None, "load_settings requires it of this role"
    settings = colocated(settings)
    assert settings.redis_url is not None
    redis, registry = connect(settings.redis_url), CollectorRegistry()
    attention = AttentionRole(settings, redis, registry, beside_experts=True)
    experts = ExpertsRole(settings, redis, registry, beside_attention=True)
    server = MetricsServer(
        registry,
        host=settings.host,
        port=settings.metrics_port,
        missing=lambda: list(dict.fromkeys([*experts.missing(), *attention.missing()])),
    )
    try:
        port = await server.start()
        log.info("metrics on port %d", port)
        await check_access(redis, stop)
        await run_both(attention, experts, scrape_url(settings, port), stop)
    finally:
        await server.close()
        await redis.aclose()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the role."""
    return run_role(COLOCATED, colocate, argv)


if __name__ == "__main__":
    sys.exit(main())
