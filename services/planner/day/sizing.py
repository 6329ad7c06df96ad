"""Sizes servers that do not scale: how many replicas the policy wants for a steady load."""

from __future__ import annotations

from dataclasses import replace

from services.planner.day.flow import Demand, flow
from services.planner.day.replay import ATTENTION, Plant
from services.planner.day.trace import Minute, Trace
from services.scheduler.scaling import Load, ScalingOptions, Signals, State, Target, decide
from services.scheduler.scaling.meter import held_back

ROUNDS, SETTLING = 300, 30
MANY = 1 << 30


def peak_of(trace: Trace) -> Minute:
    """Return the minute with the most tokens."""
    return max(trace.minutes, key=lambda minute: minute.requests_per_s * (minute.prompt_tokens + minute.output_tokens))


def sized(plant: Plant, options: ScalingOptions, minute: Minute, scale: float) -> dict[Target, int]:
    """Return the replicas that suffice for a load like ``minute``, times ``scale``, for any time."""
    awake = replace(options, sleep_after_s=0.0, down_after_s=0.0)
    wanted = dict.fromkeys((ATTENTION, *plant.shards), 1)
    for _ in range(ROUNDS):
        signals = _steady(plant, minute, minute.requests_per_s * scale, wanted)
        state = decide(signals, State.starting(0.0, wanted), awake)
        rising = {
            target: many + max(1, many // 32) if state.targets[target] > many else many
            for target, many in wanted.items()
        }
        if rising == wanted:
            break
        wanted = rising
    return wanted


def _steady(plant: Plant, minute: Minute, requests_per_s: float, replicas: dict[Target, int]) -> Signals:
    attention, seats = replicas[ATTENTION], [replicas[target] for target in plant.shards]
    shares, batch, now = plant.mix(minute), 1.0, None
    for _ in range(SETTLING):
        demand = Demand(batch=batch, prefill=requests_per_s * minute.prompt_tokens, shares=shares)
        now = flow(plant.times, attention, seats, demand, now.step_s if now else 0.0)
        assert now is not None, "there is one of each"
        batch = min(4.0 * attention * plant.places, requests_per_s * minute.output_tokens * now.step_s)
    assert now is not None
    # All attention workers count as ready: no seats are wanted in advance for those that start.
    loads = {ATTENTION: Load(work=batch / plant.places, ready=MANY)}
    for group, target in enumerate(plant.shards):
        work = now.busy[group] * held_back(now.callers, now.waiting[group])
        loads[target] = Load(work=work, ready=seats[group], useful=attention)
    return Signals(at=1.0, loads=loads, active=True)
