"""Section: the gateway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, field_validator
from pydantic_settings import NoDecode

from services.config.fields import GATEWAY, setting


class GatewaySettings(BaseModel):
    """API keys, and bounds on what clients may take."""

    auth: Literal["auto", "required", "off"] = setting(
        "auto", "API keys: auto requires them unless --host is loopback", roles=(GATEWAY,)
    )
    api_key: str | None = setting(
        None,
        "an API key that clients may use beside those of the file or of Redis; on loopback, too, they then need one. "
        "The variable keeps it out of the list of processes",
        roles=(GATEWAY,),
    )
    api_keys_file: Path | None = setting(None, "file of hashed API keys (see `expertmesh keys`)", roles=(GATEWAY,))
    allowed_origins: Annotated[list[str], NoDecode] = setting(
        [],
        "origins of web pages that browsers let use the API (CORS), comma-separated, such as https://chat.example.org; "
        "* is all",
        roles=(GATEWAY,),
    )
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

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, value: str | None) -> str | None:
        """Takes a key that a header can carry, without the end of line that a file of it has."""
        key = value and value.strip()
        if key is not None and not re.fullmatch(r"[\x21-\x7e]{8,}", key):
            raise ValueError("cannot be sent")
        return key

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> object:
        """Takes a list with commas, or a JSON list as vLLM does."""
        if not isinstance(value, str):
            return value
        words = value.strip().removeprefix("[").removesuffix("]").split(",")
        return [origin for word in words if (origin := word.strip().strip("'\""))]

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: list[str]) -> list[str]:
        if any(not re.fullmatch(r"\*|https?://[^/\s?#]+", origin) for origin in value):
            raise ValueError("is no origin")
        return value
