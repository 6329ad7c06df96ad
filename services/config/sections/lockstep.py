"""Section: attention workers that compute together."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.config.fields import ATTENTION, setting


class LockstepSettings(BaseModel):
    """Layout lockstep: ``workers`` ranks hold the experts between them, and step all together."""

    rank: int = setting(
        0, "number of this rank, from 0 (set by `serve` and the chart)", roles=(ATTENTION,), hidden=True, ge=0
    )
    lockstep_address: str | None = setting(
        None,
        "HOST:PORT of rank 0, at which the ranks meet (set by `serve` and the chart)",
        roles=(ATTENTION,),
        hidden=True,
    )
    lockstep_exchange: Literal["auto", "flat", "hierarchical"] = setting(
        "auto",
        "how ranks exchange tokens: flat (directly) or hierarchical (through relays between nodes); auto is "
        "hierarchical if there are several nodes",
        roles=(ATTENTION,),
    )
    expert_slots: int | None = setting(
        None,
        "number of experts per layer that a rank holds; more than its share makes replicas (default: its share)",
        roles=(ATTENTION,),
        ge=1,
    )
    expert_slices: int = setting(
        1,
        "number of ranks that each expert is split over, along its intermediate dimension",
        roles=(ATTENTION,),
        ge=1,
        le=256,
    )
