"""A run over time: latencies, requests, what the server's series said, and what was done to it, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from loadgen.report.plots import Curve, Mark, Plot, Point, Zone, drawn, latency_ticks
from loadgen.report.words import METRICS, amount, ms, percentile
from loadgen.results import Event, Interval, Latency, Metric, Run, Series
from services.dashboards.axes import Scale, Tick, scale, ticks
from services.dashboards.colors import of_series
from services.dashboards.draw.html import Html, element
from services.dashboards.times import nice_step

X_TICKS, Y_TICKS = 8, 4


def timeline(run: Run) -> Html:
    """Returns the plots, one below the other."""
    intervals = run.timeline
    last = max([run.duration_s, *(each.at_s + each.seconds for each in intervals)])
    x = Scale(low=0.0, high=last or 1.0)
    marks = [_mark(number, event) for number, event in enumerate(run.events, start=1)]
    plots = [
        _latency(run, "ttft", "TTFT of the requests that were due then", x),
        _latency(run, "itl", "Gaps between chunks (ITL)", x),
        _requests(intervals, x),
        _tokens(intervals, x),
        _waiting(intervals, x),
        *(_series(series, x) for series in run.series),
    ]
    shown = [replace(plot, marks=marks) for plot in plots if plot is not None]
    shown[:1] = [replace(plot, named=True) for plot in shown[:1]]
    return element("div", *(drawn(plot) for plot in shown), *_without(run.series), class_="timeline")


def _mark(number: int, event: Event) -> Mark:
    at = event.at_s if event.began_s is None else event.began_s
    said = f" – {event.error}" if event.error else f" ({event.detail})" if event.detail else ""
    return Mark(x=at, label=str(number), title=f"{number}: {event.action} {event.target} at {at:.1f} s{said}")


def _plot(title: str, curves: Sequence[Curve], x: Scale, y: Scale, unit: str, **more: object) -> Plot:
    plot = Plot(
        title=title,
        curves=curves,
        x=x,
        y=y,
        x_ticks=time_ticks(x),
        y_ticks=latency_ticks(y, Y_TICKS) if unit == "ms" else ticks(y, unit, None, Y_TICKS),
    )
    return replace(plot, **more)  # type: ignore[arg-type]


def time_ticks(x: Scale) -> list[Tick]:
    """Returns ticks of seconds; of minutes and seconds where there are more than two minutes."""
    step = nice_step(x.high / X_TICKS)
    values = [number * step for number in range(int(x.high // step) + 1)]
    clock = x.high > 120
    return [Tick(at=x.share(at), label=f"{at // 60:.0f}:{at % 60:02.0f}" if clock else f"{at:g} s") for at in values]


def _middle(each: Interval) -> float:
    return each.at_s + each.seconds / 2


def _latency(run: Run, metric: Metric, title: str, x: Scale) -> Plot | None:
    found: list[tuple[Interval, Latency | None]] = [(each, getattr(each, metric)) for each in run.timeline]
    known = [(each, latency) for each, latency in found if latency is not None]
    if not known:
        return None

    def points(value: Callable[[Latency], float]) -> list[Point]:
        return [(_middle(each), math.nan if latency is None else value(latency)) for each, latency in found]

    curves = [
        Curve(name="max", points=points(lambda latency: latency.max_ms), color="var(--s10)", kind="line", dashed=True),
        Curve(name="p99", points=points(lambda latency: latency.p99_ms), color="var(--s2)"),
        Curve(name="p50", points=points(lambda latency: latency.p50_ms), color="var(--s1)"),
    ]
    levels = [
        (each.target_ms, f"{METRICS[metric]} {percentile(each.percentile)} at most {ms(each.target_ms)}")
        for each in run.objectives
        if each.metric == metric
    ]
    y = scale([*(top for curve in curves for top in curve.tops()), *(value for value, _ in levels)], log=10)
    zones = [Zone(start=each.at_s, end=each.at_s + each.seconds, text=_said(each, latency)) for each, latency in known]
    return _plot(title, curves, x, y, "ms", levels=levels, zones=zones)


def _said(each: Interval, latency: Latency) -> str:
    figures = f"p50 {ms(latency.p50_ms)}, p99 {ms(latency.p99_ms)}, max {ms(latency.max_ms)}"
    return f"{each.at_s:g} s: {figures} of {latency.count:,}"


def _requests(intervals: Sequence[Interval], x: Scale) -> Plot | None:
    if not intervals:
        return None
    kinds = (("ok", "var(--s0)"), ("refused", "var(--s6)"), ("failed", "var(--red)"), ("disconnected", "var(--s10)"))
    base = [0.0] * len(intervals)
    curves = []
    for name, color in kinds:
        rates = [getattr(each, name) / each.seconds for each in intervals]
        if any(rates):
            points = [(each.at_s, rate) for each, rate in zip(intervals, rates, strict=True)]
            width = intervals[0].seconds
            curves.append(Curve(name=name, points=points, color=color, kind="bars", width=width, base=tuple(base)))
        base = [below + rate for below, rate in zip(base, rates, strict=True)]
    due = [(each.at_s, each.scheduled / each.seconds) for each in intervals]
    due.append((intervals[-1].at_s + intervals[-1].seconds, due[-1][1]))
    curves.append(Curve(name="due", points=due, color="var(--text)", kind="steps"))
    zones = [Zone(start=each.at_s, end=each.at_s + each.seconds, text=_counted(each)) for each in intervals]
    y = scale([top for curve in curves for top in curve.tops()], from_zero=True)
    return _plot("Requests a second: due, and ended by then", curves, x, y, "none", zones=zones)


def _counted(each: Interval) -> str:
    return f"{each.at_s:g} s: {each.scheduled} due, {each.ok} ok, {each.refused} refused, {each.failed} failed"


def _tokens(intervals: Sequence[Interval], x: Scale) -> Plot | None:
    points = [(_middle(each), each.output_tokens / each.seconds) for each in intervals]
    if not any(rate for _, rate in points):
        return None
    curve = Curve(name="output tokens", points=points, color="var(--s0)")
    zones = [
        Zone(start=each.at_s, end=each.at_s + each.seconds, text=f"{each.at_s:g} s: {amount(rate)} tokens a second")
        for each, (_, rate) in zip(intervals, points, strict=True)
    ]
    return _plot("Output tokens a second", [curve], x, scale(curve.tops(), from_zero=True), "short", zones=zones)


def _waiting(intervals: Sequence[Interval], x: Scale) -> Plot | None:
    if not intervals:
        return None
    ends = [each.at_s + each.seconds for each in intervals]
    curves = [
        Curve(name=name, points=list(zip(ends, values, strict=True)), color=color)
        for name, color, values in (
            ("in flight", "var(--s1)", [float(each.in_flight) for each in intervals]),
            ("of them without a token yet", "var(--s2)", [float(each.backlog) for each in intervals]),
        )
    ]
    y = scale([top for curve in curves for top in curve.tops()], from_zero=True)
    return _plot("Requests in flight", curves, x, y, "none")


def _series(series: Series, x: Scale) -> Plot | None:
    """Returns what Prometheus said: values hold until the next scrape, or a little longer."""
    curves = [
        Curve(name=line.label or series.name, points=line.points, color=of_series(number), kind="steps")
        for number, line in enumerate(series.lines)
    ]
    if not curves:
        return None
    y = scale([top for curve in curves for top in curve.tops()], from_zero=True)
    title = f"{series.name} ({series.unit})" if series.unit else series.name
    return _plot(title, curves, x, y, "short", note=f"Prometheus: {series.query}")


def _without(series: Sequence[Series]) -> list[Html]:
    return [
        element("p", f"{each.name}: {each.error or 'Prometheus has nothing of that time'}.", class_="note")
        for each in series
        if not each.lines
    ]
