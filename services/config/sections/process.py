"""Section: a process and its logs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.config.fields import setting


class ProcessSettings(BaseModel):
    """How a process logs, ends, and belongs to its supervisor."""

    drain_timeout: float = setting(30.0, "seconds that open requests get to end at shutdown", ge=0, le=3600)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe message that is logged")
    log_format: Literal["auto", "text", "json"] = setting("auto", "auto is text on a terminal and JSON lines elsewhere")
    supervisor_pid: int | None = setting(
        None, "process whose death ends this one (set by `serve` and `workers`)", hidden=True, ge=1
    )
    process: str | None = setting(
        None, "name of this process in its logs (set by `serve` and `workers`)", hidden=True, min_length=1
    )
