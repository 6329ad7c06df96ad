"""The settings of a process in one value, and facts about each: its section, its roles, whether users see it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.config.fields import ROLES, Role
from services.config.sections import (
    EngineSettings,
    ExpertSettings,
    GatewaySettings,
    LockstepSettings,
    ModelSettings,
    NetworkSettings,
    ProcessSettings,
    QueueSettings,
    ScalingSettings,
    TracingSettings,
)

ENV_PREFIX = "EXPERTMESH_"
_SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "Model": (ModelSettings,),
    "Memory and batching": (EngineSettings,),
    "API and network": (NetworkSettings, GatewaySettings),
    "Layout and experts": (ExpertSettings, LockstepSettings),
    "Redis and queue": (QueueSettings,),
    "Autoscaling": (ScalingSettings,),
    "Observability": (ProcessSettings, TracingSettings),
}
TOPICS = {
    topic: tuple(name for section in sections for name in section.model_fields) for topic, sections in _SECTIONS.items()
}
"""Heading in --help and `expertmesh config` -> the settings under it."""


class Settings(  # pydantic takes the fields of the last base first
    TracingSettings,
    ProcessSettings,
    ScalingSettings,
    QueueSettings,
    LockstepSettings,
    ExpertSettings,
    GatewaySettings,
    NetworkSettings,
    EngineSettings,
    ModelSettings,
    BaseSettings,
):
    """Effective configuration of a process. Times are in seconds, sizes in the unit of the name or the help.

    The constructor reads its arguments only; :func:`services.config.load_settings` reads the command line, the
    environment and the file.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leaves the other sources to ``load_layered``, which knows each value's origin."""
        return (sources["init_settings"],)

    @field_validator("*", mode="before")
    @classmethod
    def _no_numbers_from_booleans(cls, value: object, info: Any) -> object:
        """YAML's ``port: yes`` is a mistake, not port 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("is a boolean")
        return value

    @field_validator(
        *("model", "api_keys_file", "fabric_secret_file", "fabric_tls_cert", "fabric_tls_key", "fabric_tls_ca"),
        *("redis_url_file", "trace_folder"),
    )
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return value.expanduser() if value else value

    def shown(self) -> dict[str, object]:
        """Returns the values as JSON types, secrets masked."""
        values: dict[str, object] = self.model_dump(mode="json")
        masked = {"redis_url": mask_url(self.redis_url) if self.redis_url else None}
        return values | masked | {"api_key": "***" if self.api_key else None}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.shown().items()


def roles_of(name: str) -> tuple[Role, ...]:
    """Returns the roles that the setting ``name`` concerns."""
    return tuple(role for role in ROLES if role in _facts(name)["roles"])


def is_hidden(name: str) -> bool:
    """Returns whether processes hand the setting ``name`` on and users do not set it: help and tables omit it."""
    return bool(_facts(name)["hidden"])


def is_common(name: str) -> bool:
    """Returns whether most users need the setting ``name``: the short help shows it."""
    return bool(_facts(name)["common"])


def _facts(name: str) -> dict[str, Any]:
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def mask_url(url: str) -> str:
    """Returns ``url`` with its password, in the authority or in the query, as ``***``."""
    authority = re.sub(r"(?<=://)([^:/@?#]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&](?:sentinel_)?password=)[^&#]*", r"\1***", authority)
