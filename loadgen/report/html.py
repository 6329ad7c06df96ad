"""A results file as one page of HTML that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.report import tables
from loadgen.report.curves import distributions, searched, swept
from loadgen.report.table import Table
from loadgen.report.timeline import timeline
from loadgen.report.verdict import Level, Verdict, verdict
from loadgen.report.words import amount, moment, ms
from loadgen.results import Results, Run, Search, Sweep
from services.dashboards.draw.chart import STYLE
from services.dashboards.draw.html import Html, document, element

_LONG = 120
"""Characters of a cell that a column of a third of the page would make tall."""
_STYLES = (STYLE, Path(__file__).with_name("report.css"))


def write(path: Path, results: Results) -> None:
    """Writes the page of ``results`` to ``path``, whose folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    """Returns the whole page."""
    found = verdict(results)
    if isinstance(results, Run):
        body = list(_of_run(results))
    elif isinstance(results, Search):
        body = list(_of_search(results))
    else:
        body = list(_of_sweep(results))
    title = results.label or f"{type(results).__name__} of {results.target.model}"
    return document(f"{title} – expertmesh-load", _head(results, found, title), *body, styles=_STYLES)


def _head(results: Results, found: Verdict, title: str) -> Html:
    where = f"{results.target.model} at {results.target.url}, {moment(results.began_at)}"
    return element(
        "header",
        element("p", element("strong", f"{found.word}:"), " ", found.text, class_=f"verdict {_shade(found.level)}"),
        element("h1", title),
        element("p", where, class_="where"),
    )


def _shade(level: Level) -> str:
    return {Level.GOOD: "good", Level.MISSED: "missed", Level.CUT_SHORT: "missed"}.get(level, "bad")


def _of_run(run: Run) -> Iterator[Html]:
    yield _section(table(tables.latencies(run)), table(tables.objectives(run)))
    if run.timeline:
        yield element("h2", "Over time")
        yield timeline(run)
    yield distributions(run)
    yield _section(*(table(each) for each in tables.of_run(run)))


def _of_search(search: Search) -> Iterator[Html]:
    yield element("div", *searched(search), class_="pair")
    rows = [
        (amount(probe.rate), probe.verdict, probe.why, amount(probe.run.rates.output_tokens), *_latencies(probe.run))
        for probe in sorted(search.probes, key=lambda probe: probe.rate)
    ]
    head = ("requests a second", "verdict", "why", "tokens/s", "TTFT p50", "TTFT p99", "ITL p99", "end to end p99")
    yield _section(table(Table(title="What was tried", head=head, rows=rows, text=(1, 2))))
    for probe in sorted(search.probes, key=lambda probe: probe.rate):
        yield _folded(f"{amount(probe.rate)} requests a second: {probe.verdict}", probe.run)


def _of_sweep(sweep: Sweep) -> Iterator[Html]:
    yield element("div", *swept(sweep), class_="pair")
    rows = [
        (
            amount(point.load),
            amount(point.run.rates.requests),
            amount(point.run.rates.output_tokens),
            *_latencies(point.run),
            "yes" if point.saturated else "no",
            "yes" if point.pareto else "no",
            verdict(point.run).word.lower(),
        )
        for point in sweep.points
    ]
    load = "rate" if sweep.by == "rate" else "clients"
    figures = ("requests/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p99", "end to end p99")
    head = (load, *figures, "saturated", "Pareto", "verdict")
    yield _section(table(Table(title="Loads", head=head, rows=rows, text=(7, 8, 9))))
    for point in sweep.points:
        yield _folded(f"{amount(point.load)} {load}: {verdict(point.run).word.lower()}", point.run)


def _latencies(run: Run) -> list[str]:
    wanted = (("ttft", "p50_ms"), ("ttft", "p99_ms"), ("itl", "p99_ms"), ("e2e", "p99_ms"))
    return [ms(getattr(run.latency.get(metric), part, None)) for metric, part in wanted]  # type: ignore[call-overload]


def _folded(title: str, run: Run) -> Html:
    line = element("p", verdict(run).line, class_="where")
    return element("details", element("summary", title), line, *_of_run(run))


def _section(*parts: Html) -> Html:
    return element("div", *parts, class_="tables")


def table(found: Table) -> Html:
    """Returns a table with its title; nothing where it has no row and no note."""
    if not found.rows and not found.note:
        return Html("")
    head = [element("tr", *(_cell("th", text, found, at) for at, text in enumerate(found.head)))] if found.head else []
    lines = [element("tr", *(_cell("td", text, found, at) for at, text in enumerate(row))) for row in found.rows]
    grid = [element("div", element("table", *head, *lines), class_="scroll")] if lines else []
    note = [element("p", found.note, class_="note")] if found.note else []
    wide = max((len(row) for row in found.rows), default=0) > 2 or any(
        len(text) > _LONG for row in found.rows for text in row
    )
    return element("section", element("h2", found.title), *grid, *note, class_="wide" if wide else None)


def _cell(name: str, text: str, found: Table, at: int) -> Html:
    return element(name, text, class_=None if at == 0 or at in found.text else "n")
