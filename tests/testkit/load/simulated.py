"""Runs against a server that exists in numbers alone: no clock, no network."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Sequence

from loadgen.drive import Driven
from loadgen.null.behaviour import Behaviour, Turns
from loadgen.results import Objective, Schedule, Target, Workload
from loadgen.saturation import EVERY_S, Saturation
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals
from loadgen.seen import Seen
from loadgen.summary import Facts, run_of


def facts(objectives: Sequence[Objective] = (), *, rate: float = 1.0, lag_limit_s: float | None = None) -> Facts:
    return Facts(
        version="0",
        label="",
        target=Target(url="http://simulated", model="m"),
        schedule=Schedule(kind="open", text="simulated", requests=1, duration_s=1.0, rate=rate),
        workload=Workload(kind="lengths", text="simulated"),
        began_at=0.0,
        interval_s=1.0,
        lag_limit_s=lag_limit_s,
        objectives=objectives,
        settings={},
    )


def seen_by(behaviour: Behaviour, times: Sequence[float], tokens: int = 2) -> list[Seen]:
    """What clients see that send at ``times``, without any delay of their own."""
    turns = Turns(behaviour)
    every = []
    for number, moment in enumerate(times):
        dues = turns.dues(moment, tokens)
        every.append(
            Seen(
                number=number,
                scheduled=moment,
                lag_s=0.0,
                sent=moment,
                outcome="ok",
                first_token=dues[0],
                ended=dues[-1],
                status=200,
                output_tokens=tokens,
                gaps=array("d", (b - a for a, b in itertools.pairwise(dues))),
            )
        )
    return every


def simulated(
    behaviour: Behaviour, rate: float, seconds: float, objectives: Sequence[Objective], seed: int = 0
) -> Driven:
    """A run at a rate, stopped where the backlog grows."""
    every = seen_by(behaviour, arrivals(flat(rate), Gaps(1.0), seed=seed, seconds=seconds).times)
    saturation, moment, saturated = Saturation(rate), 0.0, False
    begins, ends = [seen.sent for seen in every], sorted(seen.ended for seen in every)
    while moment < seconds and not saturated:
        moment += EVERY_S
        saturated = saturation.add(moment, bisect.bisect(begins, moment) - bisect.bisect(ends, moment))
    return Driven(run_of(facts(objectives, rate=rate), every), every, saturated)
