"""Redis URLs: one server's address, or the Sentinels that know which of several servers is the primary now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEMES = ("redis", "rediss", "unix")
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
REDIS_PORT = 6379
SENTINEL_PORT = 26379
_OPTIONS = (
    "sentinel_username",
    "sentinel_password",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_check_hostname",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentinelUrl:
    """``redis+sentinel://[user:password@]host[:port],host[:port].../name[/db][?option=...]``; rediss: TLS to all.

    User and password are those of Redis; options ``sentinel_username`` and ``sentinel_password`` are the Sentinels'.
    Others are the files ``ssl_ca_certs``, ``ssl_certfile`` and ``ssl_keyfile``, and ``ssl_check_hostname=false``.
    """

    sentinels: tuple[tuple[str, int], ...]
    name: str
    db: int = 0
    tls: bool = False
    username: str | None = None
    password: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Returns the parts of ``url``. Raises ValueError."""
        scheme, _, rest = url.partition("://")
        netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
        parts = urlsplit(rest[len(netloc) :])  # urlsplit refuses several hosts of which one is in brackets
        login, _, hosts = netloc.rpartition("@")
        username, _, password = (unquote(part) for part in login.partition(":"))
        name, _, db = parts.path.strip("/").partition("/")
        options = tuple(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        if unknown := [option for option, _ in options if option not in _OPTIONS]:
            raise ValueError(f"has an unknown option {unknown[0]}")
        if not name:
            raise ValueError("lacks the primary's name, as in redis+sentinel://host:26379/mymaster/0")
        return cls(
            sentinels=tuple(_address(host) for host in hosts.split(",")),
            name=unquote(name),
            db=int(db or 0),
            tls=scheme == "rediss+sentinel",
            username=username or None,
            password=password or None,
            options=options,
        )


def server_of(url: str) -> tuple[object, ...]:
    """Returns what distinguishes the Redis of ``url`` from others: not users, passwords and ways of connecting."""
    if scheme_of(url) in SENTINEL_SCHEMES:
        several = SentinelUrl.parse(url)
        return sorted(several.sentinels), several.name, several.db
    parts = urlsplit(url)
    db = dict(parse_qsl(parts.query)).get("db")
    if parts.scheme == "unix":
        return parts.path, db or "0"
    return parts.hostname, parts.port or REDIS_PORT, db or parts.path.strip("/") or "0"


def scheme_of(url: str) -> str:
    """Returns the scheme of ``url`` in lower case; empty without one."""
    scheme, found, _ = url.partition("://")
    return scheme.lower() if found else ""


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("lacks a Sentinel's host")
    return parts.hostname, parts.port or SENTINEL_PORT


def read(file: Path) -> str:
    """Returns the URL in ``file``. Raises OSError, or ValueError, which does not show the contents."""
    try:
        return checked(file.read_text(encoding="utf-8").strip())
    except ValueError:
        raise ValueError("holds no Redis URL") from None  # the contents may be a secret


def checked(url: str) -> str:
    """Returns ``url`` if it is a Redis URL of some kind. Raises ValueError."""
    if scheme_of(url) in SENTINEL_SCHEMES:
        SentinelUrl.parse(url)
        return url
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ValueError("is not a Redis URL")
    _ = parts.port  # raises ValueError where the port is no port
    return url
