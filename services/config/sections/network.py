"""Section: the addresses of a process."""

from __future__ import annotations

from pydantic import BaseModel

from services.config.fields import COMPUTING, GATEWAY, setting


class NetworkSettings(BaseModel):
    """The addresses on which a process listens, and under which others reach it."""

    host: str = setting(
        "127.0.0.1",
        "address to listen on: for the REST API in a gateway, for metrics and health checks in other roles",
        common=True,
        min_length=1,
    )
    advertise: str | None = setting(
        None,
        "address at which other hosts reach this process (default: --host, or the machine's host name if --host is "
        "0.0.0.0 or ::)",
        roles=COMPUTING,
        min_length=1,
    )
    port: int = setting(8000, "port of the REST API; 0 picks a free one", common=True, roles=(GATEWAY,), ge=0, le=65535)
    node: str | None = setting(
        None,
        "name of the machine that this worker runs on (default: its host name); workers with the same name count as "
        "being on one machine (set by the chart)",
        roles=COMPUTING,
        hidden=True,
    )
