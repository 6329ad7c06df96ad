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
import ipaddress
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import yaml

from services.errors import ConfigError, InvalidRequest, Unauthorized
from services.queue.keys import DEFAULT_PRIORITY, PRIORITIES
from services.queue.limits import TenantLimits

ANONYMOUS = "default"
"""The tenant of every client where keys are off."""


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

    @property
    def urgent(self) -> bool:
        """Whether it may pass by those who were granted nothing."""
        return self.priority < DEFAULT_PRIORITY


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
        return parse_keys(path, path.read_bytes())
    except OSError as error:
        raise _unusable(path, error) from error


def parse_keys(path: Path, content: bytes) -> dict[str, ApiKey]:
    """The keys of ``path``, which holds ``content``, by hash. Raises ConfigError."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where the package has it
    try:
        listed = msgspec.convert(yaml.load(content, Loader=loader), _KeyFile)
    except (ValueError, yaml.YAMLError) as error:  # the former: no UTF-8, or not what is declared
        raise _unusable(path, error) from error
    keys = {key.sha256: key for key in listed.keys}
    if len(keys) != len(listed.keys):
        raise ConfigError(f"{path} lists a key twice.", hint="Remove one of the two entries.")
    return keys


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is not a usable file of API keys: {error}.",
        hint="It is YAML with `keys:`, a list of objects with `name` and `sha256`.",
    )


class KeyStore(Protocol):
    """Finds the key with a given SHA-256, or None. ``recall`` does so without asking anybody: from what it knows, which
    may be out of date. ``usable`` says whether there is anything to find keys in."""

    async def find(self, sha256: str) -> ApiKey | None: ...

    def recall(self, sha256: str) -> ApiKey | None: ...

    async def usable(self) -> bool: ...


class Authenticator:
    """Checks the ``Authorization`` header. With no store, keys are off and everybody is the same tenant."""

    def __init__(self, store: KeyStore | None) -> None:
        self._store = store

    async def identify(self, authorization: str | None) -> Caller:
        """Raises Unauthorized where keys are on and the header does not carry a known one."""
        if self._store is None:
            return Caller()
        secret = _bearer(authorization)
        if not secret:
            raise Unauthorized("An API key is required.", hint="Send the header 'Authorization: Bearer KEY'.")
        sha256 = digest(secret)
        key = await self._store.find(sha256)
        if key is None or not hmac.compare_digest(key.sha256, sha256):
            raise Unauthorized("The API key is not known.", hint="Check it, or ask the operator for one.")
        return caller_of(key)

    def recall(self, authorization: str | None) -> str:
        """The tenant as far as it can be told at once: that of a key that was seen before, or of nobody. Good for whose
        turn it is, for nothing else."""
        secret = _bearer(authorization) if self._store else ""
        key = self._store.recall(digest(secret)) if self._store and secret else None
        return key.name if key else ""


def _bearer(authorization: str | None) -> str:
    """The secret of an ``Authorization`` header; empty where it has none."""
    scheme, _, secret = (authorization or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def keys_required(auth: str, host: str) -> bool:
    """Whether clients need a key: ``auto`` asks for one unless only this machine can connect."""
    return auth == "required" or (auth == "auto" and not is_loopback(host))


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address of the loopback interface, or exactly ``localhost``: any other name is whatever
    somebody's DNS says."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
