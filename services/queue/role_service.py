"""What roles that compute have around them: the connection to Redis, and a page that says how they fare."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.config import Settings
from services.queue.connect import check_access, connect
from services.runtime import MetricsServer, scrape_url

log = logging.getLogger(__name__)


class RoleService(Protocol):
    def missing(self) -> list[str]:
        """What keeps it from serving; for /ready."""
        ...

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Until ``stop``; then drain."""
        ...


async def run_role_service(
    settings: Settings, stop: asyncio.Event, make: Callable[[Redis, CollectorRegistry], RoleService]
) -> None:
    """Run what ``make`` returns, whose series come from the registry, and close what is around it.

    Raises:
        ConfigError: Redis is too old, or does not let it in.
        PortInUse: another process has the page's port.
    """
    assert settings.redis_url is not None, "load_settings requires it of such a role"
    redis, registry = connect(settings.redis_url), CollectorRegistry()
    try:
        duty = make(redis, registry)
        server = MetricsServer(registry, host=settings.host, port=settings.metrics_port, missing=duty.missing)
        try:
            port = await server.start()
            log.info("metrics on port %d", port)
            await check_access(redis, stop)
            await duty.run(scrape_url(settings, port), stop)
        finally:
            await server.close()
    finally:
        await redis.aclose()
