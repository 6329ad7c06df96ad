"""Where API keys are looked up: a file that is followed, or the hash of the namespace in Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from services.errors import ConfigError, Overloaded, Unauthorized
from services.gateway.auth import ApiKey, parse_keys, read_key_file
from services.queue.connect import command
from services.queue.keys import DEFAULT_PRIORITY

log = logging.getLogger(__name__)
_GRACE_S = 5.0
_REMEMBERED_S = 5.0
_MOST_UNKNOWN = 4096
_LOOKUPS_PER_S = 100.0


class FileKeys:
    """Keys of a file. A change is seen at the next request; a broken change keeps the keys that were.

    A file that is gone or empty for ``grace_s`` has no keys: who deletes it means to shut everybody out. Before that it
    may be an editor's save; a Secret that Kubernetes swaps is never gone.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        *,
        tell: Callable[[float], None] = lambda _usable: None,
        grace_s: float = _GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tell`` hears 1 while the file is usable, else 0. Raises ConfigError where it is unusable now."""
        self._path = path
        self._warn = warn
        self._tell = tell
        self._grace_s = grace_s
        self._clock = clock
        self._stamp = self._look()
        self._keys: Mapping[str, ApiKey] = read_key_file(path)
        self._gone_at: float | None = None
        self._usable = True
        self._following = asyncio.Lock()
        tell(1)
        if urgent := sum(key.urgent for key in self._keys.values()):
            log.info("%d API keys may pass others by (priority below %d)", urgent, DEFAULT_PRIORITY)

    async def find(self, sha256: str) -> ApiKey | None:
        await self.usable()
        return self._keys.get(sha256)

    def recall(self, sha256: str) -> ApiKey | None:
        return self._keys.get(sha256)

    async def usable(self) -> bool:
        """Whether the file is there; its keys are those of now."""
        stamp = self._look()
        if stamp != self._stamp:
            async with self._following:
                if stamp != self._stamp:
                    await self._reload()
                    self._stamp = stamp
        if self._gone_at is not None and self._usable and self._clock() - self._gone_at >= self._grace_s:
            self._keys = {}
            self._set_usable(False)
            self._warn(f"{self._path} is gone or empty: all API keys are refused until it is back")
        return self._usable

    async def _reload(self) -> None:
        try:
            keys = await asyncio.to_thread(self._read)  # thousands of keys take a second to parse
        except ConfigError as error:
            self._gone_at = None
            self._warn(error.message)
            return
        if keys is None:
            self._gone_at = self._clock()
            return
        self._gone_at, self._keys = None, keys
        self._set_usable(True)

    def _read(self) -> Mapping[str, ApiKey] | None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}.") from error
        return parse_keys(self._path, content) if content.strip() else None

    def _set_usable(self, usable: bool) -> None:
        self._usable = usable
        self._tell(float(usable))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class RedisKeys:
    """Keys of the namespace in Redis. Answers, also negative ones, are remembered for some seconds. Keys that were
    never found are looked up so often a second at most: whoever tries them out slows down those that are new."""

    def __init__(
        self,
        redis: Redis,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        lookups_per_s: float = _LOOKUPS_PER_S,
    ) -> None:
        self._redis = redis
        self._name = name
        self._clock = clock
        self._known: dict[str, tuple[float, ApiKey]] = {}
        self._unknown: dict[str, float] = {}
        self._per_s = lookups_per_s
        self._allowance = lookups_per_s
        self._counted_at = clock()

    async def usable(self) -> bool:
        """Whether Redis answers is asked elsewhere."""
        return True

    async def find(self, sha256: str) -> ApiKey | None:
        now = self._clock()
        known = self._known.get(sha256)
        if known is not None and now < known[0]:
            return known[1]
        if now < self._unknown.get(sha256, 0.0):
            return None
        if known is None:
            self._count(now)
        raw: bytes | None = await command(self._redis, "HGET", self._name, sha256)
        key = None if raw is None else self._decode(raw, sha256)
        self._remember(sha256, key, self._clock() + _REMEMBERED_S)
        return key

    def recall(self, sha256: str) -> ApiKey | None:
        known = self._known.get(sha256)
        return known and known[1]

    def _remember(self, sha256: str, key: ApiKey | None, until: float) -> None:
        self._unknown.pop(sha256, None)
        if key is not None:
            if key.urgent and sha256 not in self._known:
                log.info("API key %s may pass others by (priority %d)", key.name, key.priority)
            self._known[sha256] = (until, key)  # as many as there are keys
            return
        self._known.pop(sha256, None)
        self._unknown[sha256] = until
        if len(self._unknown) > _MOST_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]

    def _count(self, now: float) -> None:
        self._allowance = min(self._per_s, self._allowance + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        if self._allowance < 1:
            raise Overloaded("Too many unknown API keys are tried out.", hint="Try again.", retry_after_s=1.0)
        self._allowance -= 1

    def _decode(self, raw: bytes, sha256: str) -> ApiKey | None:
        try:
            key = msgspec.json.decode(raw, type=ApiKey)
        except msgspec.ValidationError as error:
            raise Unauthorized(
                f"The record of this API key is damaged: {error}.", hint="Ask the operator to store it again."
            ) from error
        return key if key.sha256 == sha256 else None
