"""A results file as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.report import details, tables
from loadgen.report.table import Table
from loadgen.report.verdict import verdict
from loadgen.report.words import amount, moment
from loadgen.results import Results, Run, Search

_WIDTH, _CELL = 150, 48
"""Characters of a line, and of a cell where there are several, beyond which they are cut."""


def summary(results: Results) -> str:
    """Returns what a user reads when a run has ended: the verdict, then the figures."""
    where = f"{results.target.model} at {results.target.url}, {moment(results.began_at)}"
    if isinstance(results, Run):
        body = list(_of_run(results))
    elif isinstance(results, Search):
        rows = [(amount(each.rate), each.verdict, each.why) for each in results.probes]
        body = [grid(Table(title="What was tried", head=("rate", "verdict", "why"), rows=rows, text=(1, 2)))]
    else:
        load = "rate" if results.by == "rate" else "clients"
        lines = [
            (
                amount(each.load),
                amount(each.run.rates.requests),
                amount(each.run.rates.output_tokens),
                verdict(each.run).line,
            )
            for each in results.points
        ]
        body = [grid(Table(title="Loads", head=(load, "requests/s", "tokens/s", "verdict"), rows=lines, text=(3,)))]
    return "\n\n".join([printable(verdict(results).line), printable(where), *body]) + "\n"


def _of_run(run: Run) -> Iterator[str]:
    found = [
        tables.latencies(run),
        tables.objectives(run),
        tables.throughput(run),
        tables.requests(run),
        details.events(run),
        tables.errors(run),
        details.correctness(run),
        details.fairness(run),
        tables.costs(run),
        details.validity(run),
    ]
    yield from (grid(table) for table in found if table.rows)


def grid(table: Table) -> str:
    """Returns a table with columns one below the other; figures are at the right.

    >>> print(grid(Table(title="Ends", rows=[("ok", "1,200"), ("failed", "7")])))
    Ends
      ok      1,200
      failed      7
    """
    most = _WIDTH if max((len(row) for row in table.rows), default=0) < 3 else _CELL
    rows = [[_cut(cell, most) for cell in row] for row in ([table.head] if table.head else []) + list(table.rows)]
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max(map(len, rows)))]
    return "\n".join([table.title, *("  " + _line(row, widths, table.text) for row in rows)])


def _line(row: Sequence[str], widths: Sequence[int], text: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if at == 0 or at in text else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]
    return "  ".join(cells).rstrip()


def _cut(cell: str, most: int) -> str:
    clean = printable(cell)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def printable(text: str) -> str:
    """Returns ``text`` without what a terminal would obey: words of other people are in it."""
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))
