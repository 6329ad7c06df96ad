"""Section: the gateway, and how processes shut down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, field_validator
from pydantic_settings import NoDecode

from services.config.fields import GATEWAY, setting


class GatewaySettings(BaseModel):
    """API keys, bounds on what clients may take, and what open requests get at shutdown."""

    auth: Literal["auto", "required", "off"] = setting(
        "auto",
        "whether clients need an API key; auto requires one unless --host is a loopback address",
        roles=(GATEWAY,),
    )
    api_key: str | None = setting(
        None,
        "API key that clients may use, in addition to those in --api-keys-file or Redis; clients on loopback then "
        "need a key as well. Set it as EXPERTMESH_API_KEY to keep it out of the process list",
        common=True,
        roles=(GATEWAY,),
    )
    api_keys_file: Path | None = setting(None, "file of hashed API keys (see `expertmesh keys`)", roles=(GATEWAY,))
    allowed_origins: Annotated[list[str], NoDecode] = setting(
        [],
        "comma-separated origins whose web pages may call the API from a browser (CORS), such as "
        "https://chat.example.org; * allows all",
        roles=(GATEWAY,),
    )
    answer_memory: int = setting(
        256,
        "MiB of memory for answers: in progress, not yet read by their clients, and (at most a quarter of it) kept "
        "for Idempotency-Keys. When it is full, the tenant that holds the most gets 429, and its largest answers are "
        "cut off",
        roles=(GATEWAY,),
        ge=1,
        le=1 << 20,
    )
    max_body_bytes: int = setting(
        4 * 1024 * 1024, "maximum size of a request body, in bytes", roles=(GATEWAY,), ge=1024
    )
    max_connections: int = setting(
        10_000,
        "maximum number of open connections; beyond it, connections that are not being served are closed to make "
        "room, and if there are none, only health checks are answered",
        roles=(GATEWAY,),
        ge=16,
        le=1 << 20,
    )
    drain_delay: float = setting(
        0.0,
        "seconds after SIGTERM during which new requests are still accepted; up to three times as long while they "
        "keep arriving",
        roles=(GATEWAY,),
        hidden=True,
        ge=0,
        le=600,
    )
    drain_timeout: float = setting(30.0, "seconds that open requests get to finish at shutdown", ge=0, le=3600)

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
