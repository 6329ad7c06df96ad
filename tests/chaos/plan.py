"""Which fault comes when: drawn from a seed before anything starts, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

Kind = Literal[
    "kill experts",
    "kill attention",
    "kill leader",
    "kill gateway",
    "kill redis",
    "leave experts",
    "stop experts",
    "stop attention",
    "stop leader",
    "stop gateway",
    "stop redis",
    "cut",
    "cut to",
    "cut from",
    "delay",
    "lose",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
NEED_CABLES: Final[tuple[Kind, ...]] = ("cut", "cut to", "cut from", "delay", "lose")
CUT_S, DELAY_S, LOST_SHARE, IMPAIRED_S = 5.0, 0.05, 0.05, 5.0
STOPPED_LEASES: Final = 1.5
"""A stopped process has lost its lease when it goes on."""
LEADER: Final = "leader"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """``at`` in seconds after the load began. The leader is known only when its turn comes."""

    at: float
    kind: Kind
    target: str


def planned(
    seed: int, *, seconds: float, every_s: float, kinds: Sequence[Kind], members: Mapping[str, Sequence[str]]
) -> list[Event]:
    """One event every ``every_s``, the first after half of that. ``members``: role -> names.

    Kinds come in shuffled rounds: the first ``len(kinds)`` events have every kind.
    """
    rng = random.Random(seed)
    events: list[Event] = []
    bag: list[Kind] = []
    while (at := (len(events) + 0.5) * every_s) < seconds - every_s / 4:
        if not bag:
            bag = rng.sample(list(kinds), len(kinds))
        kind = bag.pop()
        events.append(Event(at=at, kind=kind, target=_target(kind, rng, members)))
    return events


def _target(kind: Kind, rng: random.Random, members: Mapping[str, Sequence[str]]) -> str:
    if kind in NEED_CABLES:
        return rng.choice([name for names in members.values() for name in names])
    role = kind.rpartition(" ")[2]
    return LEADER if role == LEADER else rng.choice(list(members[role]))
