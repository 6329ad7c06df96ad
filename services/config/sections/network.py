"""Section: the addresses of a process."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, field_validator
from pydantic_settings import NoDecode

from services.config.fields import ATTENTION, COMPUTING, EXPERTS, GATEWAY, SCHEDULER, setting


class NetworkSettings(BaseModel):
    """The addresses on which a process listens, and under which others reach it."""

    host: str = setting("127.0.0.1", "address to listen on: REST on the gateway, metrics elsewhere", min_length=1)
    advertise: str | None = setting(
        None,
        "address under which other hosts reach this process (default: --host, or this machine's name if that is any)",
        roles=COMPUTING,
        min_length=1,
    )
    port: int = setting(8000, "port of the REST API; 0 picks a free one", roles=(GATEWAY,), ge=0, le=65535)
    metrics_port: int = setting(
        0,
        "port of /metrics, /health and /ready; 0 picks a free one. Gateways: of /metrics alone; 0 is --port",
        roles=(GATEWAY, SCHEDULER, ATTENTION, EXPERTS),
        ge=0,
        le=65535,
    )
    metrics_upstreams: Annotated[list[str], NoDecode] = setting(
        [],
        "role=url of other roles' /metrics, comma-separated, that the gateway adds to its own (set by `serve`)",
        roles=(GATEWAY,),
        hidden=True,
    )
    node: str | None = setting(
        None,
        "name of the machine that this worker is on (default: the host's); workers that name the same one are near "
        "(set by the chart)",
        roles=COMPUTING,
        hidden=True,
    )

    @field_validator("metrics_upstreams", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("metrics_upstreams")
    @classmethod
    def _pairs(cls, value: list[str]) -> list[str]:
        if any(not re.match(r"^[a-z0-9_-]+=https?://", part) for part in value):
            raise ValueError("is not role=url")
        return value
