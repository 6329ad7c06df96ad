"""Stores of API keys. In: a SHA-256. Out: the key, from a file that may change, or from the namespace in Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from services.errors import ConfigError, Unauthorized
from services.gateway.auth import ApiKey, parse_keys, read_key_file
from services.queue.connect import command
from services.queue.keys import DEFAULT_PRIORITY

log = logging.getLogger(__name__)
_GRACE_S = 5.0
_REMEMBERED_S = 5.0
_UNREAD = (-1, -1, -1, -1)
"""A stamp that no file has: the file is read again at the next request."""
_AT_ONCE = 256
"""Keys in one command, which takes Redis less than a millisecond."""


class FileKeys:
    """Keys of a file. A change takes effect at the next request; a broken file leaves the former keys in force.

    A file that is missing, empty or unreadable for ``grace_s`` has no keys: deleting it shuts all clients out. For a
    shorter time an editor may be saving it; a Secret that Kubernetes swaps is never missing.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        *,
        report: Callable[[float], None] = lambda _usable: None,
        grace_s: float = _GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``report`` is called with 1 when the file is usable, else with 0. Raises ConfigError where it is not now."""
        self._path = path
        self._warn = warn
        self._report = report
        self._grace_s = grace_s
        self._clock = clock
        self._stamp = self._look()
        self._keys: Mapping[str, ApiKey] = read_key_file(path)
        self._gone_at: float | None = None
        self._usable = True
        self._following = asyncio.Lock()
        report(1)
        if urgent := sum(key.urgent for key in self._keys.values()):
            log.info("%d API keys may jump the queue (priority below %d)", urgent, DEFAULT_PRIORITY)

    async def find(self, sha256: str) -> ApiKey | None:
        await self.usable()
        return self._keys.get(sha256)

    def recall(self, sha256: str) -> ApiKey | None:
        return self._keys.get(sha256)

    async def usable(self) -> bool:
        """Says whether there are keys: the file's, or its former ones while it is broken."""
        stamp = self._look()
        if stamp != self._stamp:
            async with self._following:
                if stamp != self._stamp:
                    self._stamp = stamp if await self._reload() else _UNREAD
        if self._gone_at is not None and self._usable and self._clock() - self._gone_at >= self._grace_s:
            self._keys = {}
            self._set_usable(False)
            self._warn(f"{self._path} is missing, empty or unreadable: all API keys are refused until it is back")
        return self._usable

    async def _reload(self) -> bool:
        """Reads the file. Returns False where it has to be read again though its stamp stays."""
        try:
            keys = await asyncio.to_thread(self._read)  # thousands of keys take a second to parse
        except ConfigError as error:  # a file that was missing before stays so: a broken one brings no keys back
            self._warn(error.message)
            self._report(0)
            return True
        except OSError:
            self._miss()
            return False
        if keys is None:
            self._miss()
            return True
        self._gone_at, self._keys = None, keys
        self._set_usable(True)
        return True

    def _miss(self) -> None:
        if self._gone_at is None:
            self._gone_at = self._clock()

    def _read(self) -> Mapping[str, ApiKey] | None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        return parse_keys(self._path, content) if content.strip() else None

    def _set_usable(self, usable: bool) -> None:
        self._usable = usable
        self._report(float(usable))

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino  # ctime changes with the mode


class RedisKeys:
    """Keys of the namespace in Redis. Found keys are remembered for some seconds.

    Requests that come while Redis is asked wait, and one command looks up the keys of all that wait. So a flood of
    unknown keys takes one connection and little time, and no key has to be refused without a look.
    """

    def __init__(self, redis: Redis, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._name = name
        self._clock = clock
        self._known: dict[str, tuple[float, ApiKey]] = {}  # as many as there are keys
        self._waiting: deque[_Lookup] = deque()
        self._asking: asyncio.Task[None] | None = None

    async def usable(self) -> bool:
        """Returns True: others check whether Redis answers."""
        return True

    async def find(self, sha256: str) -> ApiKey | None:
        known = self._known.get(sha256)
        if known is not None and self._clock() < known[0]:
            return known[1]
        lookup = _Lookup(sha256, asyncio.get_running_loop().create_future())
        self._waiting.append(lookup)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        raw = await lookup.answer
        key = None if raw is None else _decode(raw, sha256)
        self._remember(sha256, key)
        return key

    def recall(self, sha256: str) -> ApiKey | None:
        known = self._known.get(sha256)
        return known and known[1]

    async def _ask(self) -> None:
        """Looks keys up until no request waits."""
        while self._waiting:
            lookups = [self._waiting.popleft() for _ in range(min(len(self._waiting), _AT_ONCE))]
            try:
                await self._answer([lookup for lookup in lookups if not lookup.answer.done()])
            finally:
                for lookup in lookups:  # some are left where this task is cancelled
                    lookup.answer.cancel()

    async def _answer(self, lookups: list[_Lookup]) -> None:
        hashes = [lookup.sha256 for lookup in lookups]
        try:
            found: list[bytes | None] = await command(self._redis, "HMGET", self._name, *hashes) if hashes else []
        except Exception as error:  # noqa: BLE001 - the waiting requests raise it
            for lookup in lookups:
                if not lookup.answer.done():
                    lookup.answer.set_exception(error)
            return
        for lookup, raw in zip(lookups, found, strict=True):
            if not lookup.answer.done():  # else its client has left
                lookup.answer.set_result(raw)

    def _remember(self, sha256: str, key: ApiKey | None) -> None:
        if key is not None:
            if key.urgent and sha256 not in self._known:
                log.info("API key %s may jump the queue (priority %d)", key.name, key.priority)
            self._known[sha256] = (self._clock() + _REMEMBERED_S, key)
        else:
            self._known.pop(sha256, None)


class _Lookup(NamedTuple):
    sha256: str
    answer: asyncio.Future[bytes | None]


def _decode(raw: bytes, sha256: str) -> ApiKey | None:
    try:
        key = msgspec.json.decode(raw, type=ApiKey)
    except msgspec.DecodeError as error:
        raise Unauthorized(
            f"The record of this API key is damaged: {error}.", hint="Ask the operator to store it again."
        ) from error
    return key if key.sha256 == sha256 else None
