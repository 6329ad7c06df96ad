"""One measurement, and the file that keeps all of them: ``results.csv``. Appended to, never rewritten."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Final

from bench.machine import Machine
from bench.timing import Timing

DEFAULT_CSV: Final = Path(__file__).with_name("results.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Times in microseconds, of one call. ``timing`` None: it could not be measured, ``error`` says why.

    ``deviation``: norm of the difference to a float32 reference over the reference's norm, on a few rows; None where
    there is no reference. ``memory_mib``: the most that was allocated during the call beyond what it was given.
    """

    suite: str
    op: str
    provider: str
    shape: str
    rows: int
    dtype: str
    floor_us: float
    timing: Timing | None = None
    deviation: float | None = None
    memory_mib: float | None = None
    error: str = ""

    @property
    def percent(self) -> float | None:
        """Of the floor: 100 would be as fast as the machine can. None without a GPU: the floor is an H200's."""
        if self.timing is None or self.timing.clock == "host" or not self.floor_us:
            return None
        return 100.0 * self.floor_us / self.timing.p50


COLUMNS: Final = (
    *("suite", "op", "provider", "shape", "rows", "dtype", "p20_us", "p50_us", "p80_us", "floor_us", "percent"),
    *("deviation", "memory_mib", "clock", "error"),
    *(field.name for field in fields(Machine)),
)


def record(row: Row, machine: Machine) -> dict[str, str]:
    """A row as the CSV holds it. Missing numbers are empty."""
    timing = row.timing
    numbers: dict[str, float | None] = {
        "p20_us": timing.p20 if timing else None,
        "p50_us": timing.p50 if timing else None,
        "p80_us": timing.p80 if timing else None,
        "floor_us": row.floor_us or None,
        "percent": row.percent,
        "deviation": row.deviation,
        "memory_mib": row.memory_mib,
    }
    texts = {name: str(getattr(row, name)) for name in ("suite", "op", "provider", "shape", "rows", "dtype")}
    rest = {"clock": timing.clock if timing else "", "error": " ".join(row.error.split()), **asdict(machine)}
    return {**texts, **{name: _number(value) for name, value in numbers.items()}, **rest}


def start(path: Path) -> None:
    """Makes sure that rows can be added; a new or empty file gets the header. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        if file.tell() == 0:
            _writer(file).writeheader()


def append(path: Path, rows: Iterable[Row], machine: Machine) -> None:
    start(path)
    with path.open("a", newline="") as file:
        _writer(file).writerows(record(row, machine) for row in rows)


def read(path: Path) -> Iterator[dict[str, str]]:
    """The records, oldest first; none if there is no file."""
    if path.exists():
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def parse(record: Mapping[str, str]) -> Row:
    """The inverse of :func:`record`, but for the machine."""

    def known(name: str) -> float | None:
        return float(record[name]) if record[name] else None

    timing = None
    if record["p50_us"]:
        cuts = {name: float(record[f"{name}_us"]) for name in ("p20", "p50", "p80")}
        timing = Timing(**cuts, clock=record["clock"])  # type: ignore[arg-type]  # written from a Timing
    return Row(
        **{name: record[name] for name in ("suite", "op", "provider", "shape", "dtype", "error")},
        rows=int(record["rows"]),
        floor_us=known("floor_us") or 0.0,
        timing=timing,
        deviation=known("deviation"),
        memory_mib=known("memory_mib"),
    )


def _writer(file: IO[str]) -> csv.DictWriter[str]:
    return csv.DictWriter(file, COLUMNS, lineterminator="\n")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}" if value < 1e5 else f"{value:.0f}"
