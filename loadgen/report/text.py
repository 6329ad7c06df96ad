"""A results file as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.report import details, tables
from loadgen.report.grid import grid, printable
from loadgen.report.table import Table
from loadgen.report.verdict import verdict
from loadgen.report.words import amount, moment
from loadgen.results import Results, Run, Search


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
