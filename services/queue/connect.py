"""The connection to Redis: its options, the check of the server, and the errors it maps to."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.config.redis_url import SCHEMES, SENTINEL_SCHEMES, SentinelUrl, scheme_of
from services.errors import ConfigError, QueueUnavailable
from services.queue.sentinel import connect_primary
from services.runtime.tasks import unless_stopped

SOCKET_TIMEOUT_S = 5.0
"""A server that is silent for this long counts as away."""
MAX_BLOCK_MS = 2_000
"""Longest blocking read; well under the socket timeout, which would end it as an error otherwise."""
MIN_VERSION = (6, 2)
_MENDED = {(6, 2): 23, (7, 2): 15, (7, 4): 10, (8, 2): 8, (8, 4): 5, (8, 6): 5, (8, 8): 1}
"""The first safe patch of each release line: older ones have faults of July 2026 and before (CVE-2025-49844,
CVE-2026-23479), by which a user who may run a script or a blocking command can take the server over. Lines that are
missing here got no such patch."""
_REFUSALS = {
    "OOM": "is out of memory; raise its maxmemory",
    "MISCONF": "cannot write to its disk; see its log",
    "READONLY": "is a read-only replica; point --redis-url at the primary",
    "LOADING": "is loading its data",
    "BUSY": "is busy with a script",
    "MASTERDOWN": "has lost its primary",
    "CLUSTERDOWN": "has lost its cluster",
    "TRYAGAIN": "is moving its data",
    "NOREPLICAS": "has too few replicas to accept writes",
    "UNBLOCKED": "changed its role",
    "NOSCRIPT": "has lost its scripts",
    "WRONGTYPE": "has something under a key of this namespace that no member writes; see who else may write there",
    "NOPERM": "does not let this user do that; compare the user's rule with `expertmesh redis-acl`",
}
_UNNAMED: dict[str, None] = (
    {"driver_info": None} if find_spec("redis.driver_info") else {"lib_name": None, "lib_version": None}
)
"""Options that keep the client from sending its name with each connection: an ACL user may not, and Redis logs it."""
_DENIED_TO_A_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""What Redis says up to 7.0, and from 7.2 on."""
_CREDENTIALS = (AuthenticationError, NoPermissionError)
_log = logging.getLogger(__name__)


def connect(url: str, *, max_connections: int = 64) -> Redis:
    """Returns a client for ``redis://``, ``rediss://`` or ``unix://`` URLs (user and password in the URL), or for the
    primary that the Sentinels of a :class:`SentinelUrl` name. Connects lazily.

    The client retries nothing, so its caller sees every call whose outcome is unknown. A caller waits for a free
    connection when ``max_connections`` are in use. Raises ConfigError for another URL.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "health_check_interval": 15,
        **_UNNAMED,
    }
    scheme = scheme_of(url)
    if scheme in SENTINEL_SCHEMES:
        try:
            primary = SentinelUrl.parse(url)
        except ValueError as error:
            raise ConfigError(f"The Redis URL {error}.") from error
        return connect_primary(primary, max_connections=max_connections, timeout_s=SOCKET_TIMEOUT_S, **options)
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{scheme or 'no scheme'!r} is not a scheme of a Redis URL.",
            hint="Use redis://host:port/0, rediss://host:port/0 (TLS), redis+sentinel://host:port,host:port/name/0 or "
            "unix:///path/to/redis.sock.",
        )
    if scheme != "unix":
        options["socket_keepalive"] = True
    try:
        pool = BlockingConnectionPool.from_url(
            url, max_connections=max_connections, timeout=SOCKET_TIMEOUT_S, **options
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The Redis URL is malformed: {error}.") from error
    return Redis.from_pool(pool)


async def check_access(redis: Redis, stop: asyncio.Event) -> None:
    """Raises ConfigError where the server is older than 6.2 or refuses the password. Returns where the server is away
    or does not answer until ``stop``: the caller waits for it."""
    try:
        await unless_stopped(_checked_info(redis), stop)
    except QueueUnavailable as error:
        _log.warning("%s", error.message)


async def check_server(redis: Redis) -> None:
    """Raises ConfigError where the server is older than 6.2 or refuses the password; QueueUnavailable if it is away.

    Warns where the server may evict keys, keeps no append-only file or has known faults.
    """
    info = await _checked_info(redis)
    if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
        _log.warning(
            "Redis may evict keys (maxmemory-policy %s), which loses requests. Set maxmemory-policy noeviction.",
            info.get("maxmemory_policy"),
        )
    if not info.get("aof_enabled") and not _private(info):
        _log.warning("Redis has no append-only file, so a restart loses queued requests. Set appendonly yes.")
    if fault := known_faults(info):
        _log.warning("%s", fault)


def known_faults(info: Mapping[str, Any]) -> str:
    """Returns a warning about faults of the version that ``info`` names; empty if it has none or the server is private.

    A fault is no reason to refuse the server: distributions mend a version and leave its number.
    """
    version = str(info["redis_version"])
    first, second, patch = (*_numbers(version), 0, 0)[:3]
    line = (first, second)
    newer = line > max(_MENDED)
    if _private(info) or "valkey_version" in info or newer or patch >= _MENDED.get(line, patch + 1):
        return ""
    cure = f"{line[0]}.{line[1]}.{_MENDED[line]}" if line in _MENDED else "a release line that is still maintained"
    return (
        f"Redis {version} has known vulnerabilities that let a client take it over (such as CVE-2025-49844, "
        f"CVE-2026-23479). Upgrade to {cure}, unless your distribution has patched this version."
    )


def _private(info: Mapping[str, Any]) -> bool:
    """Says whether the server is an embedded one on its Unix socket: gateways admit again what it loses."""
    return not info.get("tcp_port")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


async def _checked_info(redis: Redis) -> dict[str, Any]:
    with queue_errors():
        try:
            info: dict[str, Any] = await redis.info()
        except (RedisConnectionError, NoPermissionError) as error:
            if not isinstance(error, _CREDENTIALS) and not isinstance(error.__cause__, _CREDENTIALS):
                raise
            raise ConfigError(
                f"Redis rejects the credentials: {error}.", hint="Put them into the URL: redis://user:password@host."
            ) from error
    version = str(info["redis_version"])
    if _numbers(version)[:2] < MIN_VERSION:
        raise ConfigError(f"Redis {version} is too old.", hint="Version 6.2 or later is needed.")
    return info


@contextmanager
def queue_errors() -> Iterator[None]:
    """Turns any error which says that Redis is away, loading, full or read-only into QueueUnavailable."""
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        reason = _refusal(error) or f"does not answer ({type(error).__name__}: {error})"
        raise _unavailable(reason) from error
    except ResponseError as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise _unavailable(refusal) from error
    except RedisError as error:
        raise _unavailable(f"failed ({type(error).__name__}: {error})") from error


async def command(redis: Redis, *arguments: bytes | str | int | float) -> Any:
    """Returns the reply to one command. Raises QueueUnavailable."""
    with queue_errors():
        return await redis.execute_command(*arguments)  # type: ignore[no-untyped-call]


def _unavailable(reason: str) -> QueueUnavailable:
    return QueueUnavailable(f"The queue is unavailable: Redis {reason}.", retry_after_s=1)


def _refusal(error: Exception) -> str | None:
    """Returns the text for a server's refusal, else None. The client strips codes it knows; scripts wrap them."""
    denied = isinstance(error, NoPermissionError) or any(text in str(error) for text in _DENIED_TO_A_SCRIPT)
    code = "NOPERM" if denied else getattr(error, "status_code", None)
    words = [code, *re.findall(r"\b[A-Z]{3,}\b", str(error))]
    return next((_REFUSALS[word] for word in words if word in _REFUSALS), None)
