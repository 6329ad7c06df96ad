"""`expertmesh keys`: API keys and their limits, kept as SHA-256 in the file that the gateway reads, or in its Redis."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import yaml
from redis.asyncio import Redis

from services.config import OptionParser, Settings, layer, parse_options
from services.errors import ConfigError
from services.gateway.auth import ApiKey, digest, read_key_file
from services.queue.connect import command, connect, queue_errors
from services.queue.keys import DEFAULT_PRIORITY, Keys
from services.runtime.local_servers import add_url, none_found, with_local_server

_LIMITS = ("requests_per_minute", "burst", "max_concurrency", "priority", "admin")
_ACTIONS = ("create", "list", "limit", "revoke")


class KeyBook(Protocol):
    """A store of keys."""

    async def read(self) -> list[ApiKey]: ...

    async def add(self, key: ApiKey) -> None: ...

    async def replace(self, key: ApiKey, by: ApiKey) -> None:
        """Replace ``key`` by another one of the same secret."""

    async def remove(self, key: ApiKey) -> None: ...


class FileBook:
    """The file of ``--api-keys-file``, replaced as a whole so that the gateway never reads half of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> list[ApiKey]:
        return list(read_key_file(self._path).values()) if self._path.exists() else []

    async def add(self, key: ApiKey) -> None:
        self._write([*await self.read(), key])

    async def replace(self, key: ApiKey, by: ApiKey) -> None:
        self._write([by if kept == key else kept for kept in await self.read()])

    async def remove(self, key: ApiKey) -> None:
        self._write([kept for kept in await self.read() if kept != key])

    def _write(self, keys: Sequence[ApiKey]) -> None:
        text = yaml.safe_dump({"keys": [_fields(key) for key in keys]}, sort_keys=False)
        try:
            descriptor, draft = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)  # mode 0600
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(draft, self._path)
        except OSError as error:
            raise ConfigError(f"Cannot write {self._path} ({error.strerror}).", hint="Check the folder.") from error


class RedisBook:
    """The hash in Redis that gateways without a file read."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._name = name

    async def read(self) -> list[ApiKey]:
        records: dict[bytes, bytes] = await command(self._redis, "HGETALL", self._name)
        return [self._decoded(record, sha256.decode(errors="replace")) for sha256, record in records.items()]

    async def add(self, key: ApiKey) -> None:
        with queue_errors():
            await self._redis.hset(self._name, key.sha256, msgspec.json.encode(key))

    async def replace(self, key: ApiKey, by: ApiKey) -> None:  # noqa: ARG002
        await self.add(by)

    async def remove(self, key: ApiKey) -> None:
        with queue_errors():
            await self._redis.hdel(self._name, key.sha256)

    def _decoded(self, record: bytes, sha256: str) -> ApiKey:
        try:
            return msgspec.json.decode(record, type=ApiKey)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"The key {sha256[:12]} in Redis is damaged: {error}.", hint=f"Remove it: HDEL {self._name} {sha256}"
            ) from error


def main(argv: Sequence[str]) -> int:
    """Runs one action and returns the exit code."""
    given = parse_options(_parser(), argv, ["api_keys_file", "redis_url", "redis_url_file", "namespace"])
    settings = layer(given).settings
    if settings.api_keys_file is None or given["url"]:
        settings, _ = with_local_server(given)
    asyncio.run(_run(given, settings))
    return 0


def _parser() -> OptionParser:
    parser = OptionParser("expertmesh keys", "Create, list, limit or revoke API keys. Only their hashes are stored.")
    parser.add_argument("action", choices=_ACTIONS, help="create prints the new key, which is shown only once")
    parser.add_argument("name", nargs="?", help="name of the key; fairness and limits apply per name (tenant)")
    add_url(parser)
    limits = parser.add_argument_group("limits of a new key, or with `limit` of an existing one")
    limits.add_argument("--requests-per-minute", type=float, metavar="X", help="rate (default: unlimited)")
    limits.add_argument("--burst", type=int, metavar="N", help="requests that may come at once (default: a minute's)")
    limits.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight (default: unlimited)")
    limits.add_argument(
        "--priority",
        type=int,
        metavar="0-9",
        help=f"most urgent priority that its requests may have (default: {DEFAULT_PRIORITY}); 0 is served first",
    )
    limits.add_argument(
        "--admin",
        action=argparse.BooleanOptionalAction,
        help="may send the model to sleep and wake it, where --enable-sleep-mode is on (default: no)",
    )
    return parser


async def _run(given: dict[str, Any], settings: Settings) -> None:
    action, name = given["action"], given["name"]
    if action != "list" and not name:
        raise ConfigError(f"`keys {action}` needs a name.", hint=f"For example: expertmesh keys {action} alice")
    if action == "list" and name:
        raise ConfigError(f"Unexpected argument {name!r}.", hint="`keys list` takes no name.")
    if settings.api_keys_file is not None:
        await _act(action, name, given, FileBook(settings.api_keys_file))
        return
    if settings.redis_url is None:
        raise ConfigError(
            "No place for keys is given.",
            hint=f"{none_found()}: use --api-keys-file FILE or --redis-url URL.",
        )
    redis = connect(settings.redis_url)
    try:
        await _act(action, name, given, RedisBook(redis, Keys(settings.namespace).api_keys))
    finally:
        await redis.aclose()


async def _act(action: str, name: str, given: dict[str, Any], book: KeyBook) -> None:
    if action == "list":
        await _list(book)
    elif action == "create":
        await _create(name, given, book)
    elif action == "limit":
        await _limit(name, given, book)
    else:
        await _revoke(name, book)


async def _create(name: str, given: dict[str, Any], book: KeyBook) -> None:
    if any(key.name == name for key in await book.read()):
        raise ConfigError(f"A key named {name!r} already exists.", hint="Revoke it first, or choose another name.")
    secret = f"em-{secrets.token_urlsafe(32)}"
    await book.add(_key({"name": name, "sha256": digest(secret), **_limits(given)}))
    print(secret)


def _limits(given: dict[str, Any]) -> dict[str, Any]:
    return {limit: given[limit] for limit in _LIMITS if given[limit] is not None}


def _key(fields: dict[str, Any]) -> ApiKey:
    try:
        return msgspec.convert(fields, ApiKey)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{error}.", hint="Names are letters, digits, '.', '_' and '-'; limits are above 0."
        ) from error


async def _list(book: KeyBook) -> None:
    keys = sorted(await book.read(), key=lambda key: key.name)
    print("\n".join(map(_row, keys)) or "no keys")


def _row(key: ApiKey) -> str:
    values = {limit: getattr(key, limit) for limit in _LIMITS if limit != "admin"}
    limits = [f"{limit}={value:.15g}" for limit, value in values.items() if value is not None]
    return "  ".join([key.name, key.sha256[:12], *limits, *(["admin"] if key.admin else [])])


async def _limit(name: str, given: dict[str, Any], book: KeyBook) -> None:
    """Sets the limits that are given; other limits and the secret stay."""
    if not _limits(given):
        raise ConfigError("No limit is given.", hint=f"For example: expertmesh keys limit {name} --priority 5")
    for key in await _found(name, book):
        limited = _key({**msgspec.structs.asdict(key), **_limits(given)})
        await book.replace(key, limited)
        print(_row(limited))


async def _revoke(name: str, book: KeyBook) -> None:
    for key in await _found(name, book):
        await book.remove(key)
        print(f"revoked {key.name} {key.sha256[:12]}")


async def _found(name: str, book: KeyBook) -> list[ApiKey]:
    """Returns the keys with this name, or whose hash, as `list` shows it, begins so."""
    found = [key for key in await book.read() if key.name == name or (len(name) >= 8 and key.sha256.startswith(name))]
    if not found:
        raise ConfigError(f"There is no key {name!r}.", hint="See `expertmesh keys list`.")
    return found


def _fields(key: ApiKey) -> dict[str, object]:
    return {
        name: value for name, value in msgspec.structs.asdict(key).items() if value is not None and value is not False
    }
