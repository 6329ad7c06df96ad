"""Section: Redis and the queue in it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, field_validator

from services.config import redis_url as redis_urls
from services.config.fields import GATEWAY, setting


class QueueSettings(BaseModel):
    """The address of Redis, the bounds of the queue, and the leases of processes."""

    redis_url: str | None = setting(
        None, "redis://, rediss://, redis+sentinel:// or unix:// URL; `serve` without it runs a private Redis"
    )
    redis_url_file: Path | None = setting(
        None, "file that holds the Redis URL and nothing else, so that its password stands in no command line"
    )
    namespace: str = setting(
        "expertmesh",
        "prefix of all keys in Redis; deployments that share a Redis differ in it",
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$",
    )
    max_queued_requests: int = setting(1024, "requests that may wait; more get 429", roles=(GATEWAY,), ge=1)
    max_queued_tokens: int = setting(
        4_000_000, "tokens (prompt + max_tokens) that may wait; more get 429", roles=(GATEWAY,), ge=1
    )
    lease: float = setting(
        6.0,
        "seconds without a heartbeat after which a process counts as dead; a gateway after five times as long",
        ge=0.1,
        le=3600,
    )
    max_attempts: int = setting(
        8, "lost attempts after which a request is dead-lettered; 3 without a new token suffice", ge=1, le=100
    )
    request_timeout: float = setting(
        600.0, "seconds from admission to the deadline of a request", roles=(GATEWAY,), gt=0, le=86_400
    )

    @property
    def gateway_lease(self) -> float:
        """The ``lease`` of a gateway, longer than others: no process can take over a gateway's requests."""
        return 5 * self.lease

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        return value if value is None else redis_urls.checked(value)
