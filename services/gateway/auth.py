"""API keys. In: the ``Authorization`` header. Out: the caller and its limits. Keys are kept as SHA-256 only.

The file (YAML or JSON) is read again when it changes::

    keys:
      - name: alice            # the tenant: fairness, limits and metrics are per name
        sha256: 9f86d081...    # printf %s "$KEY" | sha256sum
        requests_per_minute: 600
        burst: 50
        max_concurrency: 64
        admin: true            # may send the model to sleep and wake it (POST /sleep, /wake_up)
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


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. None switches a limit off. ``priority`` is the most urgent priority that the key may ask for: priorities
    are strict, so passing all other tenants has to be granted. ``admin``: it may send the model to sleep."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    burst: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=PRIORITIES[0], le=PRIORITIES[-1])] = DEFAULT_PRIORITY
    admin: bool = False

    @property
    def urgent(self) -> bool:
        """Whether the key may pass tenants that were granted no priority."""
        return self.priority < DEFAULT_PRIORITY


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request, and what the caller may do. Where keys are off, all callers are one tenant."""

    tenant: str = ANONYMOUS
    limits: TenantLimits | None = None
    most_urgent: int = 0
    admin: bool = False

    def priority(self, asked: int | None) -> int:
        """Returns the priority to queue with. Raises InvalidRequest if the key may have none as urgent as ``asked``."""
        if asked is None:
            return max(DEFAULT_PRIORITY, self.most_urgent)
        if asked < self.most_urgent:
            raise InvalidRequest(
                f"priority {asked} is not allowed for this API key.",
                hint=f"Use {self.most_urgent} to {PRIORITIES[-1]}, or ask the operator to grant it to the key.",
                param="priority",
            )
        return asked


def digest(secret: str) -> str:
    """Returns the hash that is kept of ``secret``. Keys are long random strings, so one plain round is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_key_file(path: Path) -> dict[str, ApiKey]:
    """Returns the keys of ``path`` by hash.

    Raises:
        ConfigError: the file is missing or malformed, or names a hash twice.
    """
    try:
        return parse_keys(path, path.read_bytes())
    except OSError as error:
        raise _unusable(path, error) from error


def parse_keys(path: Path, content: bytes) -> dict[str, ApiKey]:
    """Returns the keys in ``content``, the text of the file ``path``, by hash. Raises ConfigError."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where the package has it
    try:
        listed = msgspec.convert(yaml.load(content, Loader=loader), _KeyFile)
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or not what is declared
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
    """Finds the key with a given SHA-256, or None. ``recall`` answers at once from memory, which may be out of date.
    ``usable`` says whether the store has keys to find."""

    async def find(self, sha256: str) -> ApiKey | None: ...

    def recall(self, sha256: str) -> ApiKey | None: ...

    async def usable(self) -> bool: ...


class WithKey:
    """A store that knows one key more than ``others``."""

    def __init__(self, secret: str, others: KeyStore) -> None:
        """``secret`` belongs to the tenant of clients without keys, and has no limits."""
        self._key = ApiKey(name=ANONYMOUS, sha256=digest(secret))
        self._others = others

    async def find(self, sha256: str) -> ApiKey | None:
        return self._key if self._is_it(sha256) else await self._others.find(sha256)

    def recall(self, sha256: str) -> ApiKey | None:
        return self._key if self._is_it(sha256) else self._others.recall(sha256)

    async def usable(self) -> bool:
        """Returns True: there is this key at least."""
        return True

    def _is_it(self, sha256: str) -> bool:
        return hmac.compare_digest(self._key.sha256, sha256)


class Authenticator:
    """Checks the ``Authorization`` header. Without a store keys are off and all callers are the same tenant, who may do
    everything."""

    def __init__(self, store: KeyStore | None) -> None:
        self._store = store

    async def identify(self, authorization: str | None) -> Caller:
        """Returns the caller. Raises Unauthorized where keys are on and the header carries no known key."""
        if self._store is None:
            return Caller(admin=True)
        secret = _bearer(authorization)
        if not secret:
            raise Unauthorized("An API key is required.", hint="Send the header 'Authorization: Bearer KEY'.")
        sha256 = digest(secret)
        key = await self._store.find(sha256)
        if key is None or not hmac.compare_digest(key.sha256, sha256):
            raise Unauthorized("The API key is not known.", hint="Check it, or ask the operator for one.")
        per_minute, concurrency = key.requests_per_minute, key.max_concurrency
        limits = TenantLimits(concurrency=concurrency, requests_per_minute=per_minute, burst=key.burst)
        return Caller(tenant=key.name, limits=limits, most_urgent=key.priority, admin=key.admin)

    def recall(self, authorization: str | None) -> str:
        """Returns the tenant of a key that was seen before, else ''. It answers at once and checks nothing, so use it
        only to order requests."""
        secret = _bearer(authorization) if self._store else ""
        key = self._store.recall(digest(secret)) if self._store and secret else None
        return key.name if key else ""


def _bearer(authorization: str | None) -> str:
    """Returns the secret of an ``Authorization`` header; empty where it has none."""
    scheme, _, secret = (authorization or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def keys_required(auth: str, host: str) -> bool:
    """Says whether clients need a key: ``auto`` asks for one unless only this machine can connect."""
    return auth == "required" or (auth == "auto" and not is_loopback(host))


def is_loopback(host: str) -> bool:
    """Says whether ``host`` is an address of the loopback interface, or exactly ``localhost``: DNS may give any other
    name any address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
