"""Section: the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from services.config.fields import GATEWAY, setting


class GatewaySettings(BaseModel):
    """API keys, and bounds on what clients may take."""

    auth: Literal["auto", "required", "off"] = setting(
        "auto", "API keys: auto requires them unless --host is loopback", roles=(GATEWAY,)
    )
    api_keys_file: Path | None = setting(None, "file of hashed API keys (see `expertmesh keys`)", roles=(GATEWAY,))
    answer_memory: int = setting(
        256,
        "MiB for answers: under way, not read yet by their clients, and (a quarter of it) kept for their "
        "Idempotency-Keys; over it who holds most gets 429, and its largest answers end",
        roles=(GATEWAY,),
        ge=1,
        le=1 << 20,
    )
    max_body_bytes: int = setting(4 * 1024 * 1024, "largest request body, bytes", roles=(GATEWAY,), ge=1024)
    max_connections: int = setting(
        10_000,
        "open connections; over it those that are not served make room, then probes alone are answered",
        roles=(GATEWAY,),
        ge=16,
        le=1 << 20,
    )
    drain_delay: float = setting(
        0.0,
        "seconds after SIGTERM for which requests are still taken, up to thrice as long while they keep coming",
        roles=(GATEWAY,),
        ge=0,
        le=600,
    )
