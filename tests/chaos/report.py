"""Turns what clients saw and what happened into figures: JSON, and lines for a terminal."""

from __future__ import annotations

import bisect
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.faults import Done, Exit
from chaos.load import Outcome, faults_of

_JUST_S, _BEFORE_S = 0.5, 3.0
Gap = tuple[float, float]
"""Begin and end of a wait for the next token, seconds since the load began."""


def gaps_of(outcomes: Sequence[Outcome], start: float) -> tuple[list[Gap], list[Gap]]:
    """Waits for a first token, and waits between tokens."""
    first, between = [], []
    for outcome in outcomes:
        waits = [(begin - start, end - start) for begin, end in outcome.result.gaps]
        first += waits[:1]
        between += waits[1:]
    return first, between


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    ranked = sorted(seconds) or [0.0]
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: round(1e3 * ranked[min(len(ranked) - 1, int(share * len(ranked)))], 1) for name, share in at.items()}


def longest_per_event(
    done: Sequence[Done], gaps: Sequence[Gap], start: float, effect_s: float = float("inf")
) -> list[dict[str, Any]]:
    """Events with the longest wait that each caused, of those that began within ``effect_s``; and, to compare, the
    longest that ended in the seconds before."""
    begins = [event.began - start for event in done]
    longest, before = [0.0] * len(done), [0.0] * len(done)
    for begin, end in gaps:
        cause = _cause(begins, begin, end)
        if cause is not None and begin < begins[cause] + effect_s:
            longest[cause] = max(longest[cause], end - begin)
        following = bisect.bisect_right(begins, end)
        if following < len(begins) and begins[following] - end < _BEFORE_S:
            before[following] = max(before[following], end - begin)
    return [
        {
            "at_s": round(began, 3),
            "for_s": round(event.ended - event.began, 3),
            "kind": event.event.kind,
            "target": event.target,
            "longest_gap_ms": round(1e3 * gap, 1),
            "before_ms": round(1e3 * other, 1),
        }
        for event, began, gap, other in zip(done, begins, longest, before, strict=True)
    ]


def longest_of_each_overlap(gaps: Sequence[Gap], least_s: float) -> list[Gap]:
    """The longest one of each set of waits of ``least_s`` or more that overlap, in order."""
    found: list[Gap] = []
    for begin, end in sorted(gap for gap in gaps if gap[1] - gap[0] >= least_s):
        if found and begin < found[-1][1]:
            found[-1] = max(found[-1], (begin, end), key=lambda gap: gap[1] - gap[0])
        else:
            found.append((begin, end))
    return found


def _cause(begins: Sequence[float], begin: float, end: float) -> int | None:
    """The event that caused a wait: the one that came just after the wait began, else the last one before it."""
    after = bisect.bisect_right(begins, begin)
    if after < len(begins) and begins[after] < min(end, begin + _JUST_S):
        return after
    return after - 1 if after else None


def per_second(gaps: Sequence[Gap], seconds: float) -> list[list[float]]:
    """[second, tokens, p50, p95, max], milliseconds, by when the wait ended; seconds without tokens are left out."""
    bins: dict[int, list[float]] = {}
    for begin, end in gaps:
        bins.setdefault(int(end), []).append(end - begin)
    rows = []
    for second in sorted(bins):
        if 0 <= second <= seconds:
            found = quantiles(bins[second])
            rows.append([second, len(bins[second]), found["p50"], found["p95"], found["max"]])
    return rows


def report(
    outcomes: Sequence[Outcome],
    undisturbed: Sequence[Outcome],
    done: Sequence[Done],
    exits: Sequence[Exit],
    start: float,
    effect_s: float = float("inf"),
) -> dict[str, Any]:
    """All figures of a run."""
    first, between = gaps_of(outcomes, start)
    quiet_first, quiet_between = gaps_of(undisturbed, start)
    faults = faults_of(outcomes)
    return {
        **here_and_now(),
        "requests": len(outcomes),
        "tokens": sum(len(outcome.result.token_ids) for outcome in outcomes),
        **{kind: faults[kind] for kind in ("lost", "doubled", "changed")},
        "asked_to_come_again": sum(outcome.refused for outcome in outcomes),
        "inter_token_ms": quantiles([end - begin for begin, end in between]),
        "first_token_ms": quantiles([end - begin for begin, end in first]),
        "undisturbed": {
            "requests": len(undisturbed),
            "inter_token_ms": quantiles([end - begin for begin, end in quiet_between]),
            "first_token_ms": quantiles([end - begin for begin, end in quiet_first]),
        },
        "events": longest_per_event(done, between, start, effect_s),
        "ended_by_themselves": [
            {"name": found.name, "code": found.code, "at_s": round(found.at - start, 3)} for found in exits
        ],
        "seconds": per_second(between, max((end for _, end in between), default=0.0)),
    }


def here_and_now() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()},
    }


def conclude(lines: Sequence[str], reasons: Sequence[str], files: Mapping[Path | None, str]) -> int:
    """Write what has a file, print ``lines`` and the ``reasons`` for which the run failed, and return its exit code."""
    for file, text in files.items():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.rstrip("\n") + "\n")
    print("\n".join([*lines, f"FAILED: {'; '.join(reasons)}" if reasons else "passed"]), flush=True)
    return 1 if reasons else 0


def summary(figures: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    quiet = figures["undisturbed"]["inter_token_ms"]
    worst: dict[str, list[float]] = {}
    before = [event["before_ms"] / 1e3 for event in figures["events"]]
    for event in figures["events"]:
        worst.setdefault(event["kind"], []).append(event["longest_gap_ms"])
    return [
        f"{figures['requests']} requests, {figures['tokens']} tokens: {figures['lost']} lost, "
        f"{figures['doubled']} doubled, {figures['changed']} changed; "
        f"{figures['asked_to_come_again']} times asked to come again",
        "inter-token latency, ms: " + _listed(figures["inter_token_ms"]) + "; undisturbed: " + _listed(quiet),
        "first token, ms: " + _listed(figures["first_token_ms"]),
        "longest gap in the 3 s before an event, ms: " + _listed(quantiles(before)),
        *(
            f"longest gap after {kind}, ms: {', '.join(f'{gap:.0f}' for gap in sorted(gaps))}"
            for kind, gaps in sorted(worst.items())
        ),
        *_history(figures.get("history")),
        *(f"{found['name']} ended by itself with {found['code']}" for found in figures["ended_by_themselves"]),
    ]


def _history(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    refusals, gaps = found["refusals"], found["gaps"]
    most = refusals["bounds"]
    return [
        f"history: {found['lines']} lines, {found['requests']} requests in {found['tries']} tries, of which "
        f"{found['broken']} broke; against the rules: {found['problems'] or 'nothing'}",
        *found["examples"],
        f"refusals: {refusals['count']}, met by {refusals['share_of_requests']:.1%} of requests (at most "
        f"{most['share_of_requests']:.0%}); the longest of one client {refusals['longest_s']} s (at most "
        f"{most['longest_s']:g}), of all clients {refusals['longest_of_all_s']} s",
        f"longest gap between tokens: {gaps['longest_s']} s, {gaps['without_faults_s']} s without the faults in it (at "
        f"most {gaps['bound_s']:g})",
    ]


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
