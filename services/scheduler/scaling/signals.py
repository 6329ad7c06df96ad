"""What the policy decides by: one reading of the whole server, taken by the leader or by a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.scaling.targets import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of one target, of all its replicas together.

    ``work`` is in replicas: that many, busy all the time, would just do the work. It must not depend on how many there
    are, or replicas that start would be asked for again.
    """

    work: float
    ready: int
    known: bool = True
    """Whether every replica reported its load lately. Else there may be more work than ``work``."""
    useful: int | None = None
    """Replicas above this number have nothing to do. None: there is no such bound."""
    stall: float = 0.0
    """Share of the attention workers' steps that is spent waiting for this shard group, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Loads and latencies at one moment. ``at`` is in seconds by the reader's monotonic clock."""

    at: float
    loads: Mapping[Target, Load]
    active: bool
    """Whether requests wait or run, or came since the last reading."""
    ttft: float | None = None
    """90th percentile of the last times to first token, in targets. None: there were too few."""
    tpot: float | None = None
    """90th percentile of the last times between tokens, in targets. None: there were too few."""
    few: bool = False
    """Whether requests had their tokens lately, though there may be too few for a percentile."""
