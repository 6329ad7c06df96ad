"""Compares a day under the policy with servers that do not scale and with engines that scale as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.planner.day.replay import Outcome, Plant, Way, replay
from services.planner.day.sizing import peak_of, sized
from services.planner.day.trace import Trace
from services.scheduler.scaling import ScalingOptions, Target

SEARCHES, MAX_TIMES = 6, 2.0
"""Replays to find the smallest fixed server that meets the targets as often, and the largest size, in peaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcomes of the day. ``peak``: fixed, sized by the policy's rules for the peak minute; ``equal``: the smallest
    fixed server that meets the targets as often as ``shards``. None: not even one for twice the peak does."""

    shards: Outcome
    engines: Outcome
    peak: Outcome
    equal: Outcome | None


def compare(
    trace: Trace,
    plant: Plant,
    options: ScalingOptions,
    *,
    scale: float,
    seed: int,
    progress: Callable[[str, int], None] = lambda _name, _minute: None,
) -> Comparison:
    """Replay the day in every way. ``progress`` is called with the name and the minute of a replay."""

    def run(name: str, way: Way, start: Mapping[Target, int]) -> Outcome:
        return replay(
            trace,
            plant,
            options,
            start,
            way=way,
            scale=scale,
            seed=seed,
            progress=lambda minute: progress(name, minute),
        )

    first = sized(plant, options, trace.minutes[0], scale)
    shards = run("shard groups", "shards", first)
    engines = run("whole engines", "engines", dict.fromkeys(first, max(first.values())))
    at_peak = peak_of(trace)
    peak = run("fixed for the peak", "fixed", sized(plant, options, at_peak, scale))
    equal: Outcome | None = None
    low, high = 0.0, MAX_TIMES
    for number in range(1 + SEARCHES):
        part = (low + high) / 2 if number else high
        replicas = sized(plant, options, at_peak, scale * part)
        tried = equal if equal and replicas == equal.peak else run("fixed, as good", "fixed", replicas)
        if tried.attainment >= shards.attainment:
            equal, high = tried, part
        elif equal is None:
            break
        else:
            low = part
    return Comparison(shards=shards, engines=engines, peak=peak, equal=equal)
