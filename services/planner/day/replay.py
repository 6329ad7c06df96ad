"""Replays a trace, tick by tick, through a server whose replicas the policy decides, or which are fixed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.planner.day.fleet import Fleet
from services.planner.day.server import NOTHING, Arrivals, Server, Tally, Targets
from services.planner.day.times import ServiceTimes
from services.planner.day.trace import Minute, Trace
from services.scheduler.scaling import ScalingOptions, State, Target, decide

TICK_S = 2.0
"""Tick of the simulated clock, and time between two decisions; a real leader decides every second."""
TAIL_S = 900.0
"""Time after the trace that requests may take to end."""
ATTENTION = Target("attention")
Way = Literal["shards", "engines", "fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """The server and what its replicas take. ``shares``: topic -> shard -> share of the topic's rows."""

    times: ServiceTimes
    targets: Targets
    places: int
    shares: Sequence[Sequence[float]]
    start_s: float
    drain_s: float
    attention_gpus: float
    shard_gpus: float

    @property
    def shards(self) -> list[Target]:
        return [Target("experts", number) for number in range(len(self.shares[0]))]

    def gpus(self, replicas: Mapping[Target, float]) -> float:
        return sum(
            many * (self.attention_gpus if target == ATTENTION else self.shard_gpus)
            for target, many in replicas.items()
        )

    def mix(self, minute: Minute) -> list[float]:
        """Return the share of the rows by shard."""
        topics = minute.topics or (1.0,)
        rows = [share * minute.requests_per_s for share in topics] if minute.requests_per_s else list(topics)
        total = sum(rows) or 1.0
        shards = range(len(self.shares[0]))
        return [sum(row * self.shares[topic][shard] for topic, row in enumerate(rows)) / total for shard in shards]


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Outcome of a replay. ``by_minute``: replicas that occupy a place, at the end of each minute."""

    way: Way
    gpu_hours: float = 0.0
    tally: Tally = field(default_factory=Tally)
    by_minute: list[dict[Target, int]] = field(default_factory=list)
    slo_by_minute: list[tuple[float, float]] = field(default_factory=list)
    """Requests since the start that ended, and that also met both targets."""
    changes: int = 0

    @property
    def attainment(self) -> float:
        """Share of the requests that met both targets; requests that were given up count as missed."""
        total = self.tally.ended + self.tally.given_up
        return self.tally.both_met / total if total else 1.0

    @property
    def peak(self) -> dict[Target, int]:
        return {target: max(row[target] for row in self.by_minute) for target in self.by_minute[0]}


def replay(
    trace: Trace,
    plant: Plant,
    options: ScalingOptions,
    start: Mapping[Target, int],
    *,
    way: Way,
    scale: float = 1.0,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Replay ``trace``. ``start``: replicas at the beginning, or all day where ``way`` is fixed. ``scale``: factor on
    the requests."""
    server = Server(times=plant.times, targets=plant.targets, places=plant.places)
    fleets = {target: Fleet(start_s=plant.start_s, drain_s=plant.drain_s, ready=many) for target, many in start.items()}
    state = State.starting(0.0, start)
    outcome, chance = Outcome(way=way, tally=server.tally), random.Random(seed)
    for at, minute in _ticks(trace, server):
        shares = plant.mix(minute)
        for fleet in fleets.values():
            fleet.advance(at)
        attention = fleets[ATTENTION]
        seats = [fleets[target].computing for target in plant.shards]
        server.run(
            at,
            TICK_S,
            Arrivals(
                requests=_came(minute.requests_per_s * scale * TICK_S, chance),
                prompt=minute.prompt_tokens,
                output=minute.output_tokens,
            ),
            attention=attention.ready,
            draining=len(attention.draining),
            seats=seats,
            shares=shares,
        )
        if way != "fixed":
            ready = {target: fleet.ready for target, fleet in fleets.items()}
            signals = server.signals(at, TICK_S, ready, whole=way == "engines")
            before, state = state, decide(signals, state, options)
            outcome.changes += before.targets != state.targets
            for target, many in _asked(state, way).items():
                fleets[target].want(many, at)
        _account(outcome, plant, fleets, at, progress)
    return outcome


def _asked(state: State, way: Way) -> dict[Target, int]:
    wanted = state.targets
    return dict.fromkeys(wanted, max(wanted.values())) if way == "engines" else wanted


def _account(
    outcome: Outcome, plant: Plant, fleets: Mapping[Target, Fleet], at: float, progress: Callable[[int], None]
) -> None:
    billed = {target: fleet.billed for target, fleet in fleets.items()}
    outcome.gpu_hours += plant.gpus(billed) * TICK_S / 3600
    if (at + TICK_S) % 60 < TICK_S:
        outcome.by_minute.append(billed)
        outcome.slo_by_minute.append((outcome.tally.ended, outcome.tally.both_met))
        progress(len(outcome.by_minute))


def _ticks(trace: Trace, server: Server) -> Iterator[tuple[float, Minute]]:
    """Yield ticks with their minute of the trace, and idle ones until the last requests have ended."""
    each, first = int(60 / TICK_S), trace.minutes[0].number
    for minute in trace.minutes:
        for tick in range(each):
            yield (minute.number - first) * 60 + tick * TICK_S, minute
    last, ticks = trace.minutes[-1], 0
    idle = Minute(number=0, requests_per_s=0.0, prompt_tokens=1, output_tokens=1, topics=last.topics)
    while server.queued + server.running > NOTHING and ticks * TICK_S < TAIL_S:
        yield (last.number - first + 1) * 60 + ticks * TICK_S, idle
        ticks += 1


def _came(mean: float, chance: random.Random) -> float:
    """Draw from Poisson's distribution, or from the normal one where the mean is large."""
    if mean > 30:
        return max(0.0, chance.gauss(mean, math.sqrt(mean)))
    if mean <= 0:
        return 0.0
    floor, number, product = math.exp(-mean), 0, chance.random()
    while product > floor:
        number += 1
        product *= chance.random()
    return float(number)
