"""The address at which others find this process, not always the one that it listens on, and its machine's name."""

from __future__ import annotations

import socket

from services.config import NetworkSettings

_ANY = ("0.0.0.0", "::", "")


def advertised(settings: NetworkSettings) -> str:
    """``--advertise``; else ``--host``, or this machine's name where that is every address."""
    return settings.advertise or (socket.gethostname() if settings.host in _ANY else settings.host)


def node_name(settings: NetworkSettings) -> str:
    """``--node``; else this machine's name. Containers of one machine each have their own: they need the option."""
    return settings.node or socket.gethostname()


def scrape_url(settings: NetworkSettings, port: int) -> str:
    """URL at which others scrape this process."""
    host = advertised(settings)
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
