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
        "HOST:PORT on which rank 0 meets the others (set by `serve` and the chart)",
        roles=(ATTENTION,),
        hidden=True,
    )
    lockstep_exchange: Literal["auto", "flat", "hierarchical"] = setting(
        "auto",
        "straight from rank to rank, or between nodes through relays; auto is the latter on several nodes",
        roles=(ATTENTION,),
    )
    expert_slots: int | None = setting(
        None, "experts of a layer that a rank holds; more than its share makes replicas", roles=(ATTENTION,), ge=1
    )
    expert_slices: int = setting(
        1, "ranks over which each expert is split along its inner width", roles=(ATTENTION,), ge=1, le=256
    )
