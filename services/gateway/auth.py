"""API keys: who calls, with which limits. Keys are kept as SHA-256 only, in a file or in Redis.

The file (YAML or JSON) is read again when it changes::

    keys:
      - name: alice            # the tenant: fairness, limits and metrics are per name
        sha256: 9f86d081...    # printf %s "$KEY" | sha256sum
        requests_per_minute: 600
        burst: 50
        max_concurrency: 64
        priority: 3            # the most urgent priority the key may ask for; 0 is served first. Default: 5

Without a file, Redis holds one field per key in the hash ``{namespace}:keys``: the SHA-256, and the same as JSON.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import yaml
from redis.asyncio import Redis

from services.errors import ConfigError, InvalidRequest, Unauthorized
from services.queue.connect import command
from services.queue.keys import DEFAULT_PRIORITY, PRIORITIES
from services.queue.limits import TenantLimits

ANONYMOUS = "default"
"""The tenant of every client where keys are off."""
_REMEMBERED_S = 5.0
_MOST_REMEMBERED = 4096
_LOOPBACK = ("localhost", "127.", "::1")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. None switches a limit off.

    ``priority`` is the most urgent one that it may ask for. Priorities are strict, so what would let a tenant pass all
    others by has to be granted.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    burst: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=PRIORITIES[0], le=PRIORITIES[-1])] = DEFAULT_PRIORITY


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request, and what that allows. Where keys are off, all are one tenant: nobody is passed by."""

    tenant: str = ANONYMOUS
    limits: TenantLimits | None = None
    most_urgent: int = 0

    def priority(self, asked: int | None) -> int:
        """The priority to queue with. Raises InvalidRequest for one that is more urgent than the key may have."""
        if asked is None:
            return max(DEFAULT_PRIORITY, self.most_urgent)
        if asked < self.most_urgent:
            raise InvalidRequest(
                f"priority {asked} is not allowed for this API key.",
                hint=f"Use {self.most_urgent} to {PRIORITIES[-1]}, or ask the operator to grant it to the key.",
                param="priority",
            )
        return asked


def caller_of(key: ApiKey) -> Caller:
    limits = TenantLimits(concurrency=key.max_concurrency, requests_per_minute=key.requests_per_minute, burst=key.burst)
    return Caller(tenant=key.name, limits=limits, most_urgent=key.priority)


def digest(secret: str) -> str:
    """The hash under which ``secret`` is kept. Keys are long random strings, so one plain round is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_key_file(path: Path) -> dict[str, ApiKey]:
    """The keys of ``path`` by hash.

    Raises:
        ConfigError: the file is missing or malformed, or names a hash twice.
    """
    try:
        content = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), _KeyFile)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{path} is not a usable file of API keys: {error}.",
            hint="It is YAML with `keys:`, a list of objects with `name` and `sha256`.",
        ) from error
    keys = {key.sha256: key for key in content.keys}
    if len(keys) != len(content.keys):
        raise ConfigError(f"{path} lists a key twice.", hint="Remove one of the two entries.")
    return keys


class KeyStore(Protocol):
    """Finds the key with a given SHA-256, or None."""

    async def find(self, sha256: str) -> ApiKey | None: ...


class FileKeys:
    """Keys of a file. A change is seen at the next request; a broken change keeps the keys that were."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Raises ConfigError where the file is unusable now."""
        self._path = path
        self._warn = warn
        self._stamp = self._look()
        self._keys: Mapping[str, ApiKey] = read_key_file(path)

    async def find(self, sha256: str) -> ApiKey | None:
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            self._reload()
        return self._keys.get(sha256)

    def _reload(self) -> None:
        try:
            self._keys = read_key_file(self._path)
        except ConfigError as error:
            self._warn(error.message)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class RedisKeys:
    """Keys of the namespace in Redis. Answers, also negative ones, are remembered for some seconds."""

    def __init__(self, redis: Redis, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._name = name
        self._clock = clock
        self._known: dict[str, tuple[float, ApiKey | None]] = {}

    async def find(self, sha256: str) -> ApiKey | None:
        until, key = self._known.get(sha256, (0.0, None))
        if self._clock() < until:
            return key
        raw: bytes | None = await command(self._redis, "HGET", self._name, sha256)
        key = None if raw is None else self._decode(raw, sha256)
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[sha256] = (self._clock() + _REMEMBERED_S, key)
        return key

    def _decode(self, raw: bytes, sha256: str) -> ApiKey | None:
        try:
            key = msgspec.json.decode(raw, type=ApiKey)
        except msgspec.ValidationError as error:
            raise Unauthorized(
                f"The record of this API key is damaged: {error}.", hint="Ask the operator to store it again."
            ) from error
        return key if key.sha256 == sha256 else None


class Authenticator:
    """Checks the ``Authorization`` header. With no store, keys are off and everybody is the same tenant."""

    def __init__(self, store: KeyStore | None) -> None:
        self._store = store

    async def identify(self, authorization: str | None) -> Caller:
        """Raises Unauthorized where keys are on and the header does not carry a known one."""
        if self._store is None:
            return Caller()
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("An API key is required.", hint="Send the header 'Authorization: Bearer KEY'.")
        sha256 = digest(secret.strip())
        key = await self._store.find(sha256)
        if key is None or not hmac.compare_digest(key.sha256, sha256):
            raise Unauthorized("The API key is not known.", hint="Check it, or ask the operator for one.")
        return caller_of(key)


def keys_required(auth: str, host: str) -> bool:
    """Whether clients need a key: ``auto`` asks for one unless only this machine can connect."""
    return auth == "required" or (auth == "auto" and not host.startswith(_LOOPBACK))
