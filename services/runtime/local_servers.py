"""Finds the servers that this user runs on this machine, so that commands about one need no address.

`serve` leaves a record in its private folder once its Redis answers. In: options of a command. Out: its settings, with
the Redis of the only server where none was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from services.config import Settings, layer, mask_url
from services.errors import ConfigError
from services.runtime.run_folder import RunFolder, live_folders, remove_left_behind

_RECORD = "server.json"
_NAMESPACE = Settings.model_fields["namespace"].default


class LocalServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server on this machine. ``url`` is that of its REST API; the other fields are settings, with absolute paths."""

    url: str
    model_name: str
    namespace: str
    redis_url: str | None = None
    redis_url_file: str | None = None
    api_keys_file: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """The settings by which a command reaches the server's Redis and its API keys."""
        names = ("namespace", "redis_url", "redis_url_file", "api_keys_file")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def options(self) -> str:
        """The options that choose the server, without a password."""
        redis = f"--redis-url-file {self.redis_url_file}" if self.redis_url_file else f"--redis-url {self._shown_url}"
        return redis if self.namespace == _NAMESPACE else f"{redis} --namespace {self.namespace}"

    @property
    def _shown_url(self) -> str:
        return mask_url(self.redis_url or "")


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
    )
    folder.keep(_RECORD, msgspec.json.encode(record).decode())


def local_servers() -> list[LocalServer]:
    """Return the servers that run, by URL; what killed ones left behind is removed."""
    remove_left_behind()
    found = []
    for folder in live_folders():
        with suppress(FileNotFoundError, msgspec.DecodeError):  # not yet; of a release that writes something else
            found.append(msgspec.json.decode((folder / _RECORD).read_bytes(), type=LocalServer))
    return sorted(found, key=lambda server: server.url)


def with_local_server(given: Mapping[str, Any]) -> tuple[Settings, LocalServer | None]:
    """Return the settings of a command about a deployment, and the server on this machine that it is about, if the
    settings name no Redis. Without such a server ``redis_url`` stays None.

    Args:
        given: options of the command line.

    Raises:
        ConfigError: a setting is wrong, or several servers run.
    """
    layered = layer(given)
    if layered.settings.redis_url is not None:
        return layered.settings, None
    servers = local_servers()
    if len(servers) > 1:
        lines = (f"  {each.model_name} at {each.url}: {each.options}" for each in servers)
        raise ConfigError("\n".join(["Several servers run on this machine. Choose one by its options:", *lines]))
    if not servers:
        return layered.settings, None
    values = {name: value for name, value in servers[0].settings.items() if name not in layered.origins}
    return layer(given, overrides=values).settings, servers[0]


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
