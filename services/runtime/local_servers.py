"""Finds the servers that this user runs on this machine, so that commands about one need no address.

`serve` leaves a record in its private folder once its Redis answers. In: options of a command. Out: its settings, with
those of the server that it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from services.config import OptionParser, Settings, layer
from services.config import redis_url as redis_urls
from services.errors import ConfigError
from services.runtime.run_folder import RunFolder, live_folders

COLLECTOR = "OTLP"
"""What a server's record has for the place of its traces if they go to a collector."""
_RECORD = "server.json"
_REDIS = {"redis_url", "redis_url_file"}


class LocalServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server on this machine. ``url`` is that of its REST API; the other fields are settings, with absolute paths."""

    url: str
    model_name: str
    namespace: str
    redis_url: str | None = None
    redis_url_file: str | None = None
    api_keys_file: str | None = None
    metrics_port: int = 0
    traces: str = ""
    """Where its traces go: a folder, OTLP where they go to a collector alone, empty where it does not trace."""

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of its page of metrics."""
        api = urlsplit(self.url)
        return f"{api.netloc.rpartition(':')[0]}:{self.metrics_port}" if self.metrics_port else api.netloc

    @property
    def settings(self) -> dict[str, str | None]:
        """The settings by which a command reaches the server's Redis and its API keys."""
        return {name: getattr(self, name) for name in (*_REDIS, "namespace", "api_keys_file")}

    def uses(self, redis_url: str) -> bool:
        """Return whether ``redis_url`` is an address of the server's Redis."""
        with suppress(OSError, ValueError):
            mine = self.redis_url or redis_urls.read(Path(str(self.redis_url_file)))
            return redis_urls.server_of(mine) == redis_urls.server_of(redis_url)
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class OnRay:
    """An application on a Ray cluster, as a server to ask. ``lacks``: its processes that are not ready, and why."""

    server: LocalServer
    lacks: tuple[str, ...]


FindOnRay = Callable[[str], OnRay]


def announce(folder: RunFolder, settings: Settings, *, url: str, redis_url: str) -> None:
    """Let other commands of this user find the server at ``url`` for as long as ``folder`` exists."""
    by_file = settings.redis_url_file is not None
    record = LocalServer(
        url=url,
        model_name=settings.model_name,
        namespace=settings.namespace,
        redis_url=None if by_file else redis_url,
        redis_url_file=_absolute(settings.redis_url_file),
        api_keys_file=_absolute(settings.api_keys_file),
        metrics_port=settings.metrics_port,
        traces=_absolute(settings.trace_folder) or (COLLECTOR if settings.traces_wanted else ""),
    )
    folder.keep(_RECORD, msgspec.json.encode(record).decode())


def local_servers() -> list[LocalServer]:
    """Return the servers that run, by URL."""
    return sorted((server for _, server in _records()), key=lambda server: server.url)


def folders_of(url: str) -> list[Path]:
    """Return the private folder of the supervisor that runs the server at ``url``; none where that is elsewhere."""
    return [folder for folder, server in _records() if server.url == root_url(url)]


def _records() -> Iterator[tuple[Path, LocalServer]]:
    for folder in live_folders():
        with suppress(FileNotFoundError, msgspec.DecodeError):  # not yet; of a release that writes something else
            yield folder, msgspec.json.decode((folder / _RECORD).read_bytes(), type=LocalServer)


def add_url(parser: OptionParser) -> None:
    """Add the option by which users choose one of several servers on this machine."""
    parser.add_argument("--url", help="the server on this machine that has this address (default: the only one)")


def add_ray(parser: OptionParser) -> None:
    """Add the option by which users choose an application on a Ray cluster."""
    about = "the application NAME (default: expertmesh) on the Ray cluster of RAY_ADDRESS, or on the one that runs here"
    parser.add_argument("--ray", nargs="?", const="expertmesh", metavar="NAME", help=about)


def with_server(given: Mapping[str, Any], server: LocalServer) -> Settings:
    """Return the settings of a command about ``server``.

    Raises:
        ConfigError: an option says that another one is meant.
    """
    if other := [name for name in ("url", *sorted(_REDIS), "namespace") if given.get(name) is not None]:
        raise ConfigError(f"--ray and --{other[0].replace('_', '-')} both say which deployment.", hint="Give one.")
    return layer(given, overrides=server.settings).settings


def root_url(url: str) -> str:
    """Return the address that `serve` prints, or HOST:PORT, as that of the server's root."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def with_local_server(given: Mapping[str, Any]) -> tuple[Settings, LocalServer | None]:
    """Return the settings of a command about a deployment, and the server on this machine that it is about: the one
    with the URL, the Redis and the namespace that are given. Other settings are the server's unless they are given;
    next to a URL, only the command line gives them. Without such a server ``redis_url`` may be None.

    Args:
        given: options of the command line.

    Raises:
        ConfigError: a setting is wrong, several servers may be meant, or none has the URL.
    """
    layered, url = layer(given), given.get("url")
    settings, fixed = layered.settings, set(layered.origins if url is None else given)
    redis_url = None if fixed.isdisjoint(_REDIS) else settings.redis_url
    servers = [
        server
        for server in local_servers()
        if (url is None or server.url == root_url(url))
        and (redis_url is None or server.uses(redis_url))
        and ("namespace" not in fixed or server.namespace == settings.namespace)
    ]
    if any(server.settings != servers[0].settings for server in servers):
        raise ConfigError("\n".join(["Several servers run on this machine. Choose one:", *_listed(servers)]))
    if servers:
        fixed = fixed - _REDIS if redis_url is None else fixed | _REDIS
        values = {name: value for name, value in servers[0].settings.items() if name not in fixed}
        return layer(given, overrides=values).settings, servers[0]
    if url is not None:
        raise ConfigError("\n".join([f"{none_found()}.", *_listed(local_servers())]))
    return settings, None


def none_found() -> str:
    """Say that no server is the one that is meant."""
    return "No server on this machine matches the options" if local_servers() else "No server runs on this machine"


def _listed(servers: Iterable[LocalServer]) -> list[str]:
    return [f"  {each.model_name} in namespace {each.namespace}: --url {each.url}" for each in servers]


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
