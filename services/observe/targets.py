"""Which servers Prometheus scrapes: those of this user on this machine, whenever they start, and those that are named.

Out goes a file in the format of Prometheus' file_sd, which reads it again when it changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.errors import ConfigError
from services.runtime.local_servers import LocalServer, local_servers

RELEASE = "app_kubernetes_io_instance"
"""The label by which dashboards and rules keep deployments apart, as on a cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A page of metrics at ``address`` (HOST:PORT), and what its series are called by."""

    address: str
    release: str
    namespace: str = ""
    path: str = "/metrics"
    pod: str = ""
    """What sets it apart from other pages of its release, as on a cluster."""

    def entry(self) -> dict[str, object]:
        """Return what file_sd has for it."""
        labels = {RELEASE: self.release, "namespace": self.namespace, "__metrics_path__": self.path, "pod": self.pod}
        return {"targets": [self.address], "labels": {key: value for key, value in labels.items() if value}}


def named(text: str, release: str | None = None) -> Target:
    """Return the target that a user names: HOST:PORT, or the address of a page. Without
    ``release`` it is one by itself.

    Raises:
        ConfigError: it is neither.
    """
    try:
        read = urlsplit(text if "://" in text else f"http://{text}")
        known = bool(read.hostname) and read.port is not None and read.scheme == "http"
    except ValueError:
        known = False
    if not known or "@" in read.netloc:  # a password would be in labels, and on pages
        raise ConfigError(
            f"--target {text.rpartition('@')[2]!r} is no HOST:PORT.", hint="Write it as in 127.0.0.1:8000."
        )
    path = read.path.rstrip("/").removesuffix("/v1")
    pod = read.netloc if release else ""
    return Target(address=read.netloc, release=release or read.netloc, path=path or "/metrics", pod=pod)


class Targets:
    """The file of targets. ``servers`` finds those of this machine."""

    def __init__(
        self, file: Path, given: Sequence[Target], servers: Callable[[], Sequence[LocalServer]] = local_servers
    ) -> None:
        self._file = file
        self._given = given
        self._servers = servers
        self._written: list[Target] | None = None

    def refresh(self) -> list[Target]:
        """Write the file if the targets have changed. Returns those that are new."""
        now = self.now()
        if now == self._written:
            return []
        half = self._file.with_suffix(".part")
        half.write_text(json.dumps([target.entry() for target in now]), encoding="utf-8")
        half.replace(self._file)
        new = [target for target in now if target not in (self._written or [])]
        self._written = now
        return new

    def now(self) -> list[Target]:
        """Return the targets that there are, each page once."""
        found = {target.address: target for target in map(_of_server, self._servers())}
        return [*({target.address: target for target in self._given} | found).values()]


def _of_server(server: LocalServer) -> Target:
    address = server.metrics_address
    return Target(
        address=address, release=f"{server.model_name}:{urlsplit(server.url).port}", namespace=server.namespace
    )
