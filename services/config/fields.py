"""A setting: a field with its help, its bounds and the roles that it concerns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

Role = Literal["gateway", "scheduler", "attention", "experts", "colocated", "workers"]
GATEWAY: Literal["gateway"] = "gateway"
SCHEDULER: Literal["scheduler"] = "scheduler"
ATTENTION: Literal["attention"] = "attention"
EXPERTS: Literal["experts"] = "experts"
COLOCATED: Literal["colocated"] = "colocated"
"""Attention and experts in one process: the settings of both, see :func:`services.config.options.concerned`."""
WORKERS: Literal["workers"] = "workers"
"""The workers of one machine, a process each: the settings of all of them."""
ROLES: tuple[Role, ...] = (GATEWAY, SCHEDULER, ATTENTION, EXPERTS)
WITH_MODEL: tuple[Role, ...] = (GATEWAY, ATTENTION, EXPERTS)
COMPUTING: tuple[Role, ...] = (ATTENTION, EXPERTS)


def setting(default: Any, summary: str, *, roles: tuple[Role, ...] = ROLES, hidden: bool = False, **bounds: Any) -> Any:
    """A field with its help and the roles that read it; ``bounds`` are pydantic's ge, gt, le, lt, pattern ...

    Args:
        hidden: the supervisor or the chart sets it, or tests do; no help and no table names it.
    """
    return Field(default, description=summary, json_schema_extra={"roles": list(roles), "hidden": hidden}, **bounds)


def option(name: str) -> str:
    """``max_model_len`` as it is written on the command line: ``--max-model-len``."""
    return "--" + name.replace("_", "-")
