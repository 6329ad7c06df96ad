"""Section: logs and metrics of a process."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, field_validator
from pydantic_settings import NoDecode

from services.config.fields import ATTENTION, COMPUTING, EXPERTS, GATEWAY, SCHEDULER, setting


class ProcessSettings(BaseModel):
    """How a process logs, where it shows its metrics, and to which supervisor it belongs."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "minimum severity of the messages that are logged", common=True
    )
    log_format: Literal["auto", "text", "json"] = setting(
        "auto", "format of the log; auto is text in a terminal and JSON lines elsewhere", common=True
    )
    metrics_port: int = setting(
        0,
        "port for /metrics, /health and /ready; 0 picks a free one. In a gateway it is for /metrics only, and 0 means "
        "the same port as the API",
        common=True,
        roles=(GATEWAY, SCHEDULER, ATTENTION, EXPERTS),
        ge=0,
        le=65535,
    )
    metrics_upstreams: Annotated[list[str], NoDecode] = setting(
        [],
        "/metrics pages of other roles that the gateway merges into its own, as comma-separated role=url pairs (set "
        "by `serve`)",
        roles=(GATEWAY,),
        hidden=True,
    )
    metrics_vllm_names: bool = setting(
        False,
        "also export metrics under the names that vLLM gives them (vllm:num_requests_waiting ...), for dashboards and "
        "routers that know vLLM",
        roles=(GATEWAY, SCHEDULER, ATTENTION),
    )
    layer_series: bool = setting(
        False, "export metrics for each layer; otherwise for all layers together, labelled layer=all", roles=COMPUTING
    )
    enable_sleep_mode: bool = setting(
        False,
        "let POST /sleep and POST /wake_up free the memory of all workers and take it again; callers need an API key "
        "with the right `admin`, or no key on a loopback address. Gateways and workers need the same",
        roles=(GATEWAY, ATTENTION, EXPERTS),
    )
    supervisor_pid: int | None = setting(
        None, "process whose death ends this one (set by `serve` and `workers`)", hidden=True, ge=1
    )
    process: str | None = setting(
        None, "name of this process in logs (set by `serve` and `workers`)", hidden=True, min_length=1
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
