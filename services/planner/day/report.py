"""What `expertmesh plan --trace` prints, and writes for plots."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from services.planner.day.compare import Comparison
from services.planner.day.replay import ATTENTION, Outcome, Plant
from services.planner.day.trace import Trace

HOUR = 60


def show(console: Console, trace: Trace, plant: Plant, found: Comparison, *, gpu_hour_cost: float) -> None:
    console.print(_replicas(trace, plant, found.shards))
    console.print(_ways(plant, found, gpu_hour_cost))
    for line in _verdict(found, gpu_hour_cost):
        console.print(line, highlight=False, soft_wrap=True)


def _replicas(trace: Trace, plant: Plant, outcome: Outcome) -> Table:
    """Return the maximum of each hour."""
    table = Table(title="Attention workers and seats of each shard group, maximum of each hour", title_justify="left")
    table.add_column("minute", justify="right")
    table.add_column("requests/s", justify="right")
    for target in (ATTENTION, *plant.shards):
        table.add_column(target.label or target.role, justify="right")
    for start in range(0, len(trace.minutes), HOUR):
        hour, rows = trace.minutes[start : start + HOUR], outcome.by_minute[start : start + HOUR]
        rate = max(minute.requests_per_s for minute in hour)
        counts = [str(max(row[target] for row in rows)) for target in (ATTENTION, *plant.shards)]
        table.add_row(str(hour[0].number), f"{rate:.1f}", *counts)
    return table


def _ways(plant: Plant, found: Comparison, gpu_hour_cost: float) -> Table:
    table = Table(title="The day, and the requests within the targets", title_justify="left")
    table.add_column("scaled", no_wrap=True)
    for column in ("at most", "GPU-hours", "cost", "TTFT", "TPOT", "both"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in _named(found).items():
        tally = outcome.tally
        total = max(tally.ended + tally.given_up, 1e-9)
        table.add_row(
            name,
            _peak(plant, outcome),
            f"{outcome.gpu_hours:.1f}",
            f"{outcome.gpu_hours * gpu_hour_cost:.0f}",
            *(f"{met / total:.1%}" for met in (tally.ttft_met, tally.tpot_met, tally.both_met)),
        )
    return table


def _peak(plant: Plant, outcome: Outcome) -> str:
    """Return the replicas at the peak: of attention, and of the least and of the most scaled shard group."""
    shards = [outcome.peak[target] for target in plant.shards]
    low, high = min(shards), max(shards)
    return f"{outcome.peak[ATTENTION]} + {len(shards)} x {low}" + (f"-{high}" if high > low else "")


def _named(found: Comparison) -> dict[str, Outcome]:
    named = {"shard groups": found.shards, "whole engines": found.engines, "fixed for the peak": found.peak}
    return named | ({"fixed, as good": found.equal} if found.equal else {})


def _verdict(found: Comparison, gpu_hour_cost: float) -> list[str]:
    lines = [
        f"Shard groups and attention workers by themselves take {_saved(found.shards, other)} GPU-hours than {name} "
        f"({(other.gpu_hours - found.shards.gpu_hours) * gpu_hour_cost:+.2f})."
        for name, other in _named(found).items()
        if other is not found.shards
    ]
    lines += [
        f"{name}: {outcome.tally.given_up:.0f} requests waited for so long that they were given up."
        for name, outcome in _named(found).items()
        if outcome.tally.given_up >= 1
    ]
    if found.equal is None:
        lines.append("No fixed server up to twice the peak's size meets the targets as often.")
    return lines


def _saved(mine: Outcome, other: Outcome) -> str:
    share = 1 - mine.gpu_hours / other.gpu_hours if other.gpu_hours else 0.0
    return f"{abs(share):.0%} {'fewer' if share >= 0 else 'more'}"


def figures(trace: Trace, plant: Plant, found: Comparison) -> dict[str, Any]:
    """Return all figures as JSON, for plots and comparisons."""
    return {
        "source": plant.times.source,
        "requests_per_s": [minute.requests_per_s for minute in trace.minutes],
        "ways": {name: _way(outcome) for name, outcome in _named(found).items()},
    }


def _way(outcome: Outcome) -> dict[str, Any]:
    tally = outcome.tally
    return {
        "gpu_hours": round(outcome.gpu_hours, 3),
        "attainment": round(outcome.attainment, 5),
        "ttft_met": round(tally.ttft_met),
        "tpot_met": round(tally.tpot_met),
        "both_met": round(tally.both_met),
        "ended": round(tally.ended),
        "given_up": round(tally.given_up),
        "changes": outcome.changes,
        "replicas": {target.name: [row[target] for row in outcome.by_minute] for target in outcome.by_minute[0]},
        "ended_and_met": [[round(ended), round(met)] for ended, met in outcome.slo_by_minute],
    }
