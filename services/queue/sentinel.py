"""A client of the Redis that Sentinels name as primary. After a failover new connections go to the new primary."""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from services.config.redis_url import SentinelUrl


class PrimaryPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary; a caller waits for a free one. Closes the clients of the Sentinels, too."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def connect_primary(url: SentinelUrl, *, max_connections: int, timeout_s: float, **options: Any) -> Redis:
    """Connects lazily; every new connection asks a Sentinel first. ``options`` hold for every connection."""
    extra = dict(url.options)
    login = {"username": extra.pop("sentinel_username", None), "password": extra.pop("sentinel_password", None)}
    tls: dict[str, Any] = {"ssl": True, **extra} if url.tls else {}
    if "ssl_check_hostname" in tls:
        tls["ssl_check_hostname"] = tls["ssl_check_hostname"].lower() not in ("0", "false", "no")
    sentinel = Sentinel(list(url.sentinels), sentinel_kwargs={**options, **tls, **login})  # type: ignore[no-untyped-call]
    pool = PrimaryPool(  # type: ignore[no-untyped-call]
        url.name,
        sentinel,
        max_connections=max_connections,
        timeout=timeout_s,
        db=url.db,
        username=url.username,
        password=url.password,
        **options,
        **tls,
    )
    return Redis.from_pool(pool)
