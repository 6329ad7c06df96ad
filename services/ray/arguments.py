"""What an application on Ray is made of: the arguments that `serve deploy` reads from its file. Without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.config import EXPERTS, SCHEDULER, Role, Settings, require, settings_of
from services.errors import ConfigError

NOT_HERE = ("port", "host", "metrics_port", "fabric_port", "api_key", "expert_group", "process", "supervisor_pid")
"""Settings that each process gets from where it runs, or that would stand readable in Ray's records."""


class Resources(BaseModel):
    """What Ray reserves for one process, in Ray's own units.

    ``gpus`` None: one where the cluster has any. ``labels`` are those of nodes (`ray start --labels`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: float = Field(1.0, ge=0)
    gpus: float | None = Field(None, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)


class Gateways(BaseModel):
    """Replicas of the gateway, which Ray Serve scales by the requests that each of them has.

    Each takes up to ``max_requests`` at once; each proxy holds up to ``max_queued`` more, and refuses others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_requests: float = Field(128, gt=0)
    max_requests: int = Field(1024, ge=1)
    max_queued: int = Field(1024, ge=0)
    cpus: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Gateways:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas is below min_replicas")
        return self


class Arguments(BaseModel):
    """Arguments of :func:`expertmesh.ray.app`.

    ``settings`` are the options of `expertmesh serve`, with underscores: model, layout, workers, expert_workers,
    expert_groups, redis_url, autoscale and so on. ``runtime_env`` is Ray's, for all processes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any]
    schedulers: int = Field(2, ge=1)
    gateways: Gateways = Field(default_factory=Gateways)
    scheduler: Resources = Field(default_factory=lambda: Resources(cpus=0.1, gpus=0))
    attention: Resources = Field(default_factory=Resources)
    experts: Resources = Field(default_factory=Resources)
    runtime_env: dict[str, Any] = Field(default_factory=dict)

    def resources_of(self, role: Role) -> Resources:
        """Return what a process of ``role`` reserves; one that has attention and experts counts as attention."""
        return {SCHEDULER: self.scheduler, EXPERTS: self.experts}.get(role, self.attention)

    def checked_settings(self) -> Settings:
        """Return the settings that all processes share.

        Raises:
            ConfigError: one is unknown, malformed, not for Ray, or contradicts another.
        """
        for name in NOT_HERE:
            if name in self.settings:
                raise ConfigError(
                    f"settings.{name} cannot be set on Ray: each process gets its own.",
                    hint="API keys are made with `expertmesh keys`, or read from settings.api_keys_file."
                    if name == "api_key"
                    else "Leave it out.",
                )
        settings = settings_of(self.settings, "arguments of the Ray application: settings")
        require(settings, None)
        if settings.layout == "lockstep":
            raise ConfigError(
                "layout lockstep is not offered on Ray: its ranks start and end together.",
                hint="Choose local, disaggregated or colocated.",
            )
        if settings.model is None:
            raise ConfigError("settings.model is missing.", hint="Give a folder that all nodes have, or ORG/NAME.")
        return settings


def read(arguments: Mapping[str, Any]) -> Arguments:
    """Return ``arguments`` of a file of `serve deploy`. Raises ConfigError, which names the first one that is wrong."""
    try:
        return Arguments.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "args"
        raise ConfigError(f"Arguments of the Ray application: {where}: {first['msg']}.") from error


def handed_over(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON types for a process elsewhere, without the secret that is kept in a file: Ray shows
    arguments. :func:`services.config.settings_of` reads them, and the file."""
    values = settings.model_dump(mode="json")
    return values if settings.redis_url_file is None else values | {"redis_url": None}
