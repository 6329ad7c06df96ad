"""The page of a report: whole, in one file, and nobody's words become markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from testkit.load_results import BEGAN, TARGET, a_disturbed_run, a_run

from loadgen.report import html
from loadgen.report.verdict import verdict
from loadgen.results import (
    Correctness,
    Counts,
    ErrorGroup,
    Event,
    Group,
    Interval,
    Line,
    Objective,
    Point,
    Probe,
    Rates,
    Results,
    Run,
    Schedule,
    Search,
    Series,
    Sweep,
    Target,
    Validity,
    Workload,
    WrongAnswer,
)

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&lt;{{7*7}}</style></title>"
VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """What is in a page. Elements that are not closed in order fail the test."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open[-1] != "style":
            self.text.append(data.strip())


@pytest.fixture(scope="module")
def disturbed() -> Run:
    return a_disturbed_run(seconds=40)


@pytest.fixture(scope="module")
def short() -> Run:
    return a_run(seconds=3)


def a_search(run: Run) -> Search:
    objective = Objective(metric="ttft", percentile=99, target_ms=500, value_ms=300.0, met=True)
    measured = msgspec.structs.replace(run, objectives=[objective])
    probes = [
        Probe(rate=float(rate), verdict=found, why="because", run=measured)  # type: ignore[arg-type]
        for rate, found in enumerate(("met", "missed", "unsure", "saturated", "invalid"), start=1)
    ]
    return Search(
        version="0.1.0",
        target=TARGET,
        began_at=BEGAN,
        confidence=0.95,
        objectives=[objective],
        rate=1.0,
        low=1.0,
        high=2.0,
        goodput=1.0,
        probes=probes,
    )


def a_sweep(run: Run) -> Sweep:
    points = [Point(load=float(load), pareto=load == 2, saturated=False, run=run) for load in (1, 2)]
    return Sweep(version="0.1.0", target=TARGET, began_at=BEGAN, by="rate", points=points)


def test_it_needs_nothing_else(disturbed: Run) -> None:
    for results in (disturbed, a_search(disturbed), a_sweep(disturbed)):
        text = html.page(results)
        page = Page(text)
        assert {"script", "link", "img", "iframe", "object", "base", "form"}.isdisjoint(page.names)
        assert not [each for each in page.attributes if each[1] in ("src", "href", "srcset", "action", "xlink:href")]
        assert not [each for each in page.attributes if each[1].startswith("on")]
        style = text[text.index("<style>") : text.index("</style>")]
        assert not re.search(r"url\(|@import|@font-face", style)
        assert set(re.findall(r"https?://[^\s<\"'),]+", text)) <= {TARGET.url}
        assert "prefers-color-scheme: dark" in style
        assert ("meta", "name", "viewport") in page.attributes


@pytest.mark.parametrize("kind", ["run", "search", "sweep"])
def test_its_first_line_is_the_verdict(short: Run, kind: str) -> None:
    late = Validity(valid=False, lag_p99_ms=80, reasons=["the load generator was late"])
    run = msgspec.structs.replace(short, validity=late)
    results: Results = {"run": run, "search": a_search(run), "sweep": a_sweep(run)}[kind]
    body = html.page(results).partition("<body>")[2]
    assert " ".join(Page(body.removesuffix("</body></html>\n")).text[:2]) == verdict(results).line
    if kind != "search":
        assert verdict(results).word == "INVALID"


def hostile(run: Run) -> Run:
    """A run in which every word that comes from elsewhere is an attack."""
    latency = run.latency
    group = Group(
        name=HOSTILE,
        counts=Counts(scheduled=1, ok=1),
        rates=Rates(requests=1, output_tokens=1),
        share=1,
        latency=latency,
    )
    return msgspec.structs.replace(
        run,
        label=HOSTILE,
        version=HOSTILE,
        target=Target(url=HOSTILE, model=HOSTILE, server=HOSTILE),
        schedule=Schedule(kind="x", text=HOSTILE, requests=1, duration_s=1),
        workload=Workload(kind="x", text=HOSTILE),
        validity=Validity(valid=False, lag_p99_ms=1, reasons=[HOSTILE], warnings=[HOSTILE]),
        errors=[ErrorGroup(kind=HOSTILE, count=1, first_at_s=0, last_at_s=1, example=HOSTILE)],
        tenants=[group],
        priorities=[group],
        classes=[group],
        correctness=Correctness(
            reference=HOSTILE,
            checked=1,
            wrong=1,
            examples=[WrongAnswer(number=1, expected=HOSTILE, found=HOSTILE, differs_at=0)],
        ),
        events=[Event(at_s=1, action="run", target=HOSTILE, began_s=1, ended_s=2, detail=HOSTILE, error=HOSTILE)],
        series=[
            Series(
                name=HOSTILE, query=HOSTILE, unit=HOSTILE, lines=[Line(label=HOSTILE, points=[(0.0, 1.0), (1.0, 2.0)])]
            ),
            Series(name=HOSTILE, query=HOSTILE, error=HOSTILE),
        ],
        environment={HOSTILE: HOSTILE},
        settings={HOSTILE: HOSTILE, "gpus": HOSTILE},
    )


def test_no_word_becomes_markup(short: Run) -> None:
    run = hostile(short)
    for results in (run, a_search(run), a_sweep(run)):
        page = Page(html.page(results))
        assert {"script", "img"}.isdisjoint(page.names)
        assert not [each for each in page.attributes if each[1].startswith("on")]
        assert any(HOSTILE in text for text in page.text), "it is shown as it is written"


def test_events_are_marked_on_every_plot_of_the_time_axis(disturbed: Run) -> None:
    text = html.page(disturbed)
    plots = text.count("<figure") - 2
    assert plots == 7, (
        "TTFT, ITL, requests, tokens, in flight, and two series of Prometheus; distributions are the rest"
    )
    assert text.count('class="mark"') == plots * len(disturbed.events)
    assert 'style="left:75%">1</span>' in text
    assert "1: kill experts-1 at 30.0 s (process 4711)" in text


def test_what_prometheus_does_not_know_is_said(disturbed: Run) -> None:
    assert "Errors of the server: Prometheus has nothing of that time." in html.page(disturbed)
    refused = Series(name="Queue", query="a", error="status 403")
    assert "Queue: status 403." in html.page(msgspec.structs.replace(disturbed, series=[refused]))


def test_figures_of_the_run_are_there(disturbed: Run) -> None:
    words = Page(html.page(disturbed)).text
    for word in ("GPU-hours of this run", "Fairness", "blue", "http 503", "no replica of a shard group", "req-371"):
        assert word in words
    for figure in ("p99.9", "95 % between", "longest gap until the next"):
        assert figure in words


ODD: dict[str, dict[str, Any]] = {
    "nothing was answered": {"counts": Counts(scheduled=5, failed=5), "latency": {}, "timeline": []},
    "no request": {
        "counts": Counts(scheduled=0),
        "latency": {},
        "timeline": [Interval(at_s=0.0, seconds=1.0)],
        "duration_s": 0.0,
    },
    "one second": {"timeline": [Interval(at_s=0.0, seconds=1.0, scheduled=1, sent=1, ok=1)], "duration_s": 0.4},
    "cost without tokens": {
        "rates": Rates(requests=0, output_tokens=0),
        "settings": {"gpus": 4, "price_per_gpu_hour": 2},
    },
    "hours": {"duration_s": 30000.0},
}


@pytest.mark.parametrize("case", ODD)
def test_odd_runs_have_a_page(short: Run, tmp_path: Path, case: str) -> None:
    file = tmp_path / "made/page.html"
    html.write(file, msgspec.structs.replace(short, **ODD[case]))
    assert Page(file.read_text(encoding="utf-8")).names.count("h1") == 1
    assert "nan" not in file.read_text(encoding="utf-8").lower().replace("tenant", "")
