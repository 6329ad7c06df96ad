"""What a bench found: every sample, the figures that follow from them, and where all of it was measured."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadgen.environment import environment
from services.runtime import release

FORM = 1
"""Of the files that this release writes."""
Kind = Literal["latency", "throughput", "serve"]
Unit = Literal["ms", "tokens/s", "requests/s", "requests"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """``samples`` in the order in which they were measured."""

    median: float
    least: float
    most: float
    samples: Sequence[float]


def spread(samples: Sequence[float]) -> Spread:
    """Returns the spread of samples, of which there is one at least.

    >>> spread([3.0, 1.0, 2.0]).median
    2.0
    """
    return Spread(median=statistics.median(samples), least=min(samples), most=max(samples), samples=list(samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One quantity of each side. ``ratio`` is ours over that of vLLM, by the medians."""

    name: str
    unit: Unit
    sides: Mapping[str, Spread]
    ratio: float | None = None


def figure(name: str, unit: Unit, sides: Mapping[str, Sequence[float]]) -> Figure:
    """Returns the figure of samples by side, ours first; a side without samples is left out."""
    found = {side: spread(samples) for side, samples in sides.items() if samples}
    ratio = None
    if len(found) == 2:
        ours, theirs = (each.median for each in found.values())
        ratio = ours / theirs if theirs else None
    return Figure(name=name, unit=unit, sides=found, ratio=ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The content of a file of results. ``options``: what was given or holds by default; ``sides``: versions and
    settings of each; ``samples``: one object for each thing that was measured, with its side. ``cut_short``: it was
    ended by Ctrl-C, and what is missing was not measured. ``verdicts``: the load generator's, by side."""

    form: int = FORM
    kind: Kind
    version: str
    commit: str | None
    began_at: float
    model: str
    workload: str
    seed: int
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    sides: Mapping[str, Mapping[str, Any]]
    figures: Sequence[Figure]
    samples: Sequence[Any]
    verdicts: Mapping[str, str] = field(default_factory=dict)
    cut_short: bool = False


def origin() -> dict[str, Any]:
    """Returns the members of a report that say what measured, and on which machine."""
    return {"version": version_here(), "commit": _commit(), "environment": environment()}


def version_here() -> str:
    """Returns the version of this program, or ``unknown`` in a clone that is not installed."""
    try:
        return release()
    except PackageNotFoundError:
        return "unknown"


def _commit() -> str | None:
    """Returns the commit of the clone that this file is in, with a plus where files differ from it; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def encoded(report: Report) -> bytes:
    """Returns the report as JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
