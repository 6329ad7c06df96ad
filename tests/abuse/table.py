"""What a run of attacks is kept and shown as: attack, bound, what was seen, and what was seen before the mending."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.report import here_and_now

from abuse.attack import Record

BEFORE = Path(__file__).parent / "before.json"
_ENDS = (" ended", " for want of memory")
_FIGURES = re.compile(r"^(an honest stream|/health|Redis took|the gateway had|Redis had|\d+ (probes|honest))")
"""What is held against a run and shown by the figures of its line."""


@dataclass(kw_only=True)
class Book:
    """The records of a run, in their order; ``limits``: how the memory limits are held, by role."""

    records: list[Record] = field(default_factory=list)
    limits: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> Record:
        self.records.append(record)
        return record

    def all(self) -> dict[str, Any]:
        attacks = [asdict(record) | {"summary": summary(record)} for record in self.records]
        return {"setting": setting(self.limits), "attacks": attacks}

    def brief(self) -> dict[str, Any]:
        """What ``before.json`` has: a line and the broken bounds of each."""
        attacks = {r.name: {"seen": summary(r), "broken": r.broken} for r in self.records}
        return {"setting": setting(self.limits), "attacks": attacks}

    def lines(self) -> list[str]:
        """The table, and beneath it which bounds broke."""
        known = before()
        rows: list[tuple[str, ...]] = [("", "attack", "bound", "seen", "before")]
        rows += [_row(record, known.get(record.name, "")) for record in self.records]
        lines = as_markdown(rows)
        lines += [f"  {r.name}: {what}" for r in self.records for what in r.broken]
        held = [record for record in self.records if not record.broken]
        return [*lines, f"{len(held)} of {len(self.records)} attacks did no harm; limits by {self.limits or 'none'}"]


def setting(limits: dict[str, str]) -> dict[str, Any]:
    """Which commit, when and where."""
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit, "limits": limits} | here_and_now()


def before() -> dict[str, str]:
    """By attack, what was seen on the commit that ``before.json`` names."""
    if not BEFORE.exists():
        return {}
    found = json.loads(BEFORE.read_text())["attacks"]
    return {name: entry["seen"] + ("" if entry["broken"] else " (no harm)") for name, entry in found.items()}


def summary(record: Record) -> str:
    """One line of what was seen, and the first thing held against it that no figure shows."""
    seen = record.seen
    if "rss_peak" not in seen:
        return ", ".join(f"{name} {value}" for name, value in seen.items())
    honest = seen.get("honest", {})
    other = next((what for what in record.broken if not _FIGURES.search(what)), "")
    parts = [
        f"{record.seconds:.1f} s",
        _figure("gap", honest.get("longest"), "s", 2),
        _figure("/health", seen["health"], "s", 2),
        _figure("gateway", seen["rss_peak"], "MiB", 0),
        _figure("PING", _above(seen["ping"], 0.1), "s", 2),
        _figure("Redis", _above(seen["redis_peak"], 64), "MiB", 0),
        f"{len(honest['faults'])} streams broken" if honest.get("faults") else "",
        f"{len(honest['refused'])} refused" if honest.get("refused") else "",
        f"{len(seen['failed'])} probes failed" if seen["failed"] else "",
        *(what.replace("was killed for want of memory", "OOM") for what in record.broken if what.endswith(_ENDS)),
        "" if other.endswith(_ENDS) else other,
    ]
    return ", ".join(part for part in parts if part)


def _above(value: float | None, least: float) -> float | None:
    return value if value is not None and value > least else None


def _figure(name: str, value: float | None, unit: str, digits: int) -> str:
    return "" if value is None else f"{name} {value:.{digits}f} {unit}"


def _bound(record: Record) -> str:
    bounds = record.bounds
    if "gap" not in bounds:
        return ", ".join(f"{name} {value}" for name, value in bounds.items())
    return f"gap {bounds['gap']:g} s, /health {bounds['health']:g} s, {bounds['peak']:g} MiB"


def _row(record: Record, earlier: str) -> tuple[str, ...]:
    mark = "FAILED" if record.broken else ""
    return mark, f"{record.finding} {record.name}", _bound(record), summary(record), earlier


def as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def as_markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table for a terminal and for a page alike; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
