"""The names by which others find this process: its address, its machine, and a name that is only its own."""

from __future__ import annotations

import os
import socket
import uuid

from services.config import NetworkSettings

_ANY = ("0.0.0.0", "::", "")


def advertised(settings: NetworkSettings) -> str:
    """Return ``--advertise``; else ``--host``, or this machine's name where that is every address."""
    return settings.advertise or (socket.gethostname() if settings.host in _ANY else settings.host)


def node_name(settings: NetworkSettings) -> str:
    """Return ``--node``; else this machine's name. Containers of one machine have their own: they need the option."""
    return settings.node or socket.gethostname()


def incarnation() -> str:
    """Draw a name that no other process has, not even the one that replaces this one: host, number, random digits."""
    return incarnations_of(os.getpid()) + uuid.uuid4().hex[:8]


def incarnations_of(pid: int, host: str | None = None) -> str:
    """Return what the name of every incarnation of the process ``pid`` of ``host`` (default: this one) begins with."""
    return f"{host or socket.gethostname()}-{pid}-"


def scrape_url(settings: NetworkSettings, port: int) -> str:
    """Return the URL at which others scrape this process."""
    host = advertised(settings)
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
