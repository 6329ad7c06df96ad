"""A report as a table for a terminal: a row for each figure, with both sides and their ratio where there are two."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.report.grid import grid, printable
from loadgen.report.table import Table
from loadgen.report.words import amount, ms
from services.bench.report import Figure, Report, Spread
from services.config import option


def text(report: Report) -> str:
    """Returns the lines that a user reads at the end."""
    lines = [printable(f"{report.model}: {report.workload}"), *_where(report), ""]
    lines += [f"{side}: {printable(verdict)}" for side, verdict in report.verdicts.items()]
    if report.cut_short:
        lines.append("CUT SHORT: it was ended before its end, and these are the figures until then.")
    lines.append(grid(_table(report)))
    return "\n".join(lines) + "\n"


def _where(report: Report) -> Iterator[str]:
    for side, facts in report.sides.items():
        shown = ("version", "device", "dtype", "experts", "url")
        words = ("experts " * (name == "experts") + str(facts[name]) for name in shown if facts.get(name))
        yield f"{side}: " + printable(", ".join(words))
    if len(report.sides) > 1:
        yield from _differences(report)


def _differences(report: Report) -> Iterator[str]:
    """Yields how much a step takes, where the sides differ or one does not say it: their figures differ with it."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        found = {side: facts.get(name) for side, facts in report.sides.items()}
        values = set(found.values())
        if len(values) > 1 or None in values:
            said = (f"{side} {'its default' if value is None else f'{value:,}'}" for side, value in found.items())
            yield f"{option(name)}: {', '.join(said)}"


def _table(report: Report) -> Table:
    sides = list(report.sides)
    ranges = any(len(found.samples) > 1 for figure in report.figures for found in figure.sides.values())
    head = ["", *(name for side in sides for name in ((side, "least", "most") if ranges else (side,)))]
    if len(sides) == 2:
        head.append(" / ".join(sides))
    rows = [_row(figure, sides, ranges) for figure in report.figures]
    return Table(title=report.kind, head=head, rows=rows)


def _row(figure: Figure, sides: list[str], ranges: bool) -> list[str]:
    cells = [figure.name]
    for side in sides:
        cells += _cells(figure, figure.sides.get(side), ranges)
    if len(sides) == 2:
        cells.append("–" if figure.ratio is None else f"{figure.ratio:.2f}")
    return cells


def _cells(figure: Figure, found: Spread | None, ranges: bool) -> list[str]:
    if found is None:
        return ["–"] * (3 if ranges else 1)
    values = [found.median, found.least, found.most] if ranges else [found.median]
    return [ms(value) if figure.unit == "ms" else f"{amount(value)}{_after(figure)}" for value in values]


def _after(figure: Figure) -> str:
    return "" if figure.unit == "requests" else "/s"
