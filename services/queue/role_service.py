"""The frame of a role that computes: the connection to Redis, and the page with its metrics and readiness."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.config import EXPERTS, Role, Settings
from services.queue.connect import check_access, connect
from services.runtime import MetricsServer, scrape_url, show_build

log = logging.getLogger(__name__)


class RoleService(Protocol):
    def missing(self) -> list[str]:
        """Returns what keeps the role from serving, for /ready."""
        ...

    async def run(self, metrics_url: str, stop: asyncio.Event) -> None:
        """Serves until ``stop``, then drains."""
        ...


async def run_role_service(
    role: Role, settings: Settings, stop: asyncio.Event, make: Callable[[Redis, CollectorRegistry], RoleService]
) -> None:
    """Runs the service of ``role`` that ``make`` returns, serves its registry on the metrics page, and closes both.

    Raises:
        ConfigError: Redis is too old, or refuses the credentials.
        PortInUse: another process has the page's port.
    """
    assert settings.redis_url is not None, "load_settings requires it of such a role"
    redis, registry = connect(settings.redis_url), CollectorRegistry()
    if role != EXPERTS:  # whose status names the release
        show_build(registry, role, settings.process)
    try:
        service = make(redis, registry)
        server = MetricsServer(registry, host=settings.host, port=settings.metrics_port, missing=service.missing)
        try:
            port = await server.start()
            log.info("metrics on port %d", port)
            await check_access(redis, stop)
            await service.run(scrape_url(settings, port), stop)
        finally:
            await server.close()
    finally:
        await redis.aclose()
