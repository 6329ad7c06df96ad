"""What the policy decides by: one reading of the whole server, taken by the leader or by a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.scaling.targets import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Of one target, all its replicas together.

    ``work`` is in replicas: so many, busy all the time, would just do what is asked for. It must not depend on how many
    there are, or those that start would be asked for again.
    """

    work: float
    ready: int
    known: bool = True
    """Whether every replica told its load lately. Where not, there may be more work than ``work``."""
    useful: int | None = None
    """More replicas than this have nothing to do; None: no such bound."""
    stall: float = 0.0
    """Of a shard group: share of the attention workers' steps that is spent waiting for it, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """``at`` in seconds by the reader's own clock, which never goes back."""

    at: float
    loads: Mapping[Target, Load]
    active: bool
    """Requests wait or run, or came since the reading before."""
    ttft: float | None = None
    """Nine of ten requests lately had their first token within so many times the target; None: too few to tell."""
    tpot: float | None = None
    """Likewise for the time between tokens."""
    few: bool = False
    """Requests had their tokens lately, if too few to tell more."""
