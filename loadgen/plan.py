"""All that a run needs to know, in one object that other processes can be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.answers import Answers
from loadgen.client import StreamResult
from loadgen.manners import Manners
from loadgen.results import Objective
from loadgen.schedule.schedule import Schedule
from loadgen.validity import LagLimit
from loadgen.workload.bodies import Bodies
from loadgen.workload.conversation import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long clients wait, in seconds; None: for ever."""

    connect_s: float | None = 30.0
    silence_s: float | None = None
    total_s: float | None = 600.0


@dataclass(frozen=True, slots=True)
class Closed:
    """``clients`` that wait for each answer, until ``requests`` or ``seconds`` are over."""

    clients: int
    requests: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A load. ``shard``: its number and how many there are; ``start_at``: second 0 of the schedule in Unix seconds,
    None for as soon as all is made. ``stop_saturated``: end a run whose backlog grows. ``ca``: a file of certificates
    to trust."""

    url: str
    bodies: Bodies
    source: Source
    load: Schedule | Closed
    manners: Manners = field(default_factory=Manners)
    limits: Limits = field(default_factory=Limits)
    stream: bool = True
    key: str | None = None
    ca: Path | None = None
    answers: Answers | None = None
    on_answer: Callable[[Mapping[str, object], StreamResult], None] | None = None
    """Gets each body that was answered with its answer, in this process."""
    record_to: Path | None = None
    """A file that gets a line for each answer."""
    objectives: Sequence[Objective] = ()
    confidence: float = 0.95
    lag_limit: LagLimit = field(default_factory=LagLimit)
    shard: tuple[int, int] = (0, 1)
    start_at: float | None = None
    stop_saturated: bool = False
    spool: Path | None = None
    """A folder for what is seen of many requests; without it all of it is in memory."""
    server: str | None = None
    label: str = ""
    settings: dict[str, object] = field(default_factory=dict)
