"""Settings are fields with a help text, bounds and the roles that they concern."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

Role = Literal["gateway", "scheduler", "attention", "experts", "colocated", "workers"]
GATEWAY: Literal["gateway"] = "gateway"
SCHEDULER: Literal["scheduler"] = "scheduler"
ATTENTION: Literal["attention"] = "attention"
EXPERTS: Literal["experts"] = "experts"
COLOCATED: Literal["colocated"] = "colocated"
"""Attention and experts in one process, with the settings of both; see :func:`services.config.options.concerned`."""
WORKERS: Literal["workers"] = "workers"
"""The workers of one machine, a process each, with the settings of all of them."""
ROLES: tuple[Role, ...] = (GATEWAY, SCHEDULER, ATTENTION, EXPERTS)
WITH_MODEL: tuple[Role, ...] = (GATEWAY, ATTENTION, EXPERTS)
COMPUTING: tuple[Role, ...] = (ATTENTION, EXPERTS)


def setting(
    default: Any,
    summary: str,
    *,
    roles: tuple[Role, ...] = ROLES,
    common: bool = False,
    hidden: bool = False,
    **bounds: Any,
) -> Any:
    """Returns a field with its help and the roles that read it; ``bounds`` are pydantic's ge, gt, le, lt, pattern ...

    ``common``: most users need it, so the short help shows it. ``hidden``: the supervisor, the chart or tests set it;
    help and tables omit it.
    """
    facts: dict[str, Any] = {"roles": list(roles), "common": common, "hidden": hidden}
    return Field(default, description=summary, json_schema_extra=facts, **bounds)


def option(name: str) -> str:
    """Returns ``max_model_len`` as it is written on the command line: ``--max-model-len``."""
    return "--" + name.replace("_", "-")
