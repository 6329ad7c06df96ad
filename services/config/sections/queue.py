"""Section: Redis and the queue in it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, field_validator

from services.config import redis_url as redis_urls
from services.config.fields import GATEWAY, setting


class QueueSettings(BaseModel):
    """The address of Redis, the bounds of the queue, and the leases of processes."""

    redis_url: str | None = setting(
        None,
        "URL of Redis: redis://, rediss://, redis+sentinel:// or unix:// (default: `serve` starts a private Redis)",
        common=True,
    )
    redis_url_file: Path | None = setting(
        None, "file that contains nothing but the URL of Redis, to keep its password out of command lines"
    )
    namespace: str = setting(
        "expertmesh",
        "prefix of all keys in Redis; deployments that share a Redis need different ones",
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$",
    )
    max_queued_requests: int = setting(
        1024, "maximum number of waiting requests; further ones get 429", roles=(GATEWAY,), ge=1
    )
    max_queued_tokens: int = setting(
        4_000_000,
        "maximum number of tokens (prompt + max_tokens) of waiting requests; requests beyond it get 429",
        roles=(GATEWAY,),
        ge=1,
    )
    lease: float = setting(
        6.0,
        "seconds without a heartbeat after which a process counts as dead; five times as long for a gateway",
        ge=0.1,
        le=3600,
    )
    max_attempts: int = setting(
        8,
        "number of lost attempts after which a request is given up (dead-lettered); 3 in a row without a new token "
        "are enough",
        ge=1,
        le=100,
    )
    request_timeout: float = setting(
        600.0, "seconds from the admission of a request to its deadline", roles=(GATEWAY,), gt=0, le=86_400
    )

    @property
    def gateway_lease(self) -> float:
        """The ``lease`` of a gateway, longer than others: no process can take over a gateway's requests."""
        return 5 * self.lease

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        return value if value is None else redis_urls.checked(value)
