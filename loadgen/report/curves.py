"""Distributions of a run's latencies, and latency over the load of a search or a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.report.distribution import counted, cumulative, nines
from loadgen.report.plots import Curve, Plot, drawn, latency_ticks
from loadgen.report.words import METRICS, amount, ms, percentile
from loadgen.results import Metric, Probe, Run, Search, Sweep
from services.dashboards.axes import Scale, Tick, scale, ticks
from services.dashboards.draw.html import Html, element

SHOWN: Mapping[Metric, str] = {"ttft": "var(--s1)", "itl": "var(--s2)", "tpot": "var(--s3)", "e2e": "var(--s0)"}
_SHARES = (0.5, 0.9, 0.99, 0.999, 0.9999)
_VERDICTS = {
    "met": "var(--green)",
    "missed": "var(--red)",
    "saturated": "var(--purple)",
    "unsure": "var(--yellow)",
    "invalid": "var(--soft)",
}


def distributions(run: Run) -> Html:
    """Returns two plots: the share of values below each latency, and latency by percentile with a stretched tail."""
    found = {
        metric: cumulative(counted(run.latency[metric]))
        for metric in SHOWN
        if metric in run.latency and run.latency[metric].count
    }
    if not found:
        return Html("")
    values = [value for points in found.values() for value, _ in points]
    x = scale(values, log=10)
    below = [
        Curve(name=METRICS[metric], points=points, color=SHOWN[metric], kind="steps")
        for metric, points in found.items()
    ]
    up = Scale(low=0.0, high=1.0)
    cdf = Plot(
        title="Share of values that are not above",
        curves=below,
        x=x,
        y=up,
        x_ticks=latency_ticks(x, 6),
        y_ticks=ticks(up, "percentunit", None, 5),
    )
    return element("div", drawn(cdf), drawn(_tails(found, x)), class_="pair")


def _tails(found: Mapping[Metric, Sequence[tuple[float, float]]], values: Scale) -> Plot:
    most = max(
        sum(1 for share in _SHARES if share <= points[-2][1]) if len(points) > 1 else 1 for points in found.values()
    )
    shares = _SHARES[: max(most + 1, 3)]
    x = Scale(low=0.0, high=nines(shares[-1]))
    curves = [
        Curve(
            name=METRICS[metric],
            points=[(min(nines(share), x.high), value) for value, share in points],
            color=SHOWN[metric],
            kind="line",
        )
        for metric, points in found.items()
    ]
    return Plot(
        title="Latency by percentile",
        curves=curves,
        x=x,
        y=values,
        x_ticks=[Tick(at=x.share(nines(share)), label=percentile(round(100 * share, 3))) for share in shares],
        y_ticks=latency_ticks(values, 5),
    )


def searched(search: Search) -> list[Html]:
    """Returns a plot for each objective: its value at each rate that was tried."""
    found = []
    for objective in search.objectives:
        of_metric = [(probe, _value(probe, objective.metric, objective.percentile)) for probe in search.probes]
        known = [(probe, value) for probe, value in of_metric if value is not None]
        if not known:
            continue
        curves = [
            Curve(name=verdict, points=points, color=color, kind="dots")
            for verdict, color in _VERDICTS.items()
            if (points := [(probe.rate, value) for probe, value in known if probe.verdict == verdict])
        ]
        x = scale([probe.rate for probe, _ in known], from_zero=True)
        y = scale([*(value for _, value in known), objective.target_ms], log=10)
        name = f"{METRICS[objective.metric]} {percentile(objective.percentile)}"
        plot = Plot(
            title=f"{name} over the rate, requests a second",
            curves=curves,
            x=x,
            y=y,
            x_ticks=ticks(x, "none", None, 8),
            y_ticks=latency_ticks(y, 4),
            levels=[(objective.target_ms, f"at most {ms(objective.target_ms)}")],
        )
        found.append(drawn(plot))
    return found


def _value(probe: Probe, metric: Metric, wanted: float) -> float | None:
    """Returns what a probe measured of an objective."""
    for each in probe.run.objectives:
        if (each.metric, each.percentile) == (metric, wanted):
            return each.value_ms
    return None


def swept(sweep: Sweep) -> list[Html]:
    """Returns latency over throughput: a dot for each load, joined in the order of the loads."""
    points = [point for point in sweep.points if "e2e" in point.run.latency and point.run.rates.output_tokens > 0]
    if not points:
        return []
    x = scale([point.run.rates.output_tokens for point in points], from_zero=True)
    curves: list[Curve] = []
    for metric, color in (("ttft", "var(--s1)"), ("e2e", "var(--s0)")):
        known = [point for point in points if metric in point.run.latency]
        for part, dashed in (("p50", False), ("p99", True)):
            joined = [(p.run.rates.output_tokens, float(getattr(p.run.latency[metric], f"{part}_ms"))) for p in known]  # type: ignore[index]
            name = f"{METRICS[metric]} {part}{', dashed' if dashed else ''}"  # type: ignore[index]
            curves.append(Curve(name=name, points=joined, color=color, dashed=dashed))
    best = [(point.run.rates.output_tokens, point.run.latency["e2e"].p50_ms) for point in points if point.pareto]
    curves.append(Curve(name="no other load is better in both", points=best, color="var(--s2)", kind="dots"))
    y = scale([top for curve in curves for top in curve.tops()], log=10)
    unit = "requests a second" if sweep.by == "rate" else "clients"
    loads = ", ".join(amount(point.load) for point in points)
    plot = Plot(
        title="Latency over output tokens a second",
        curves=curves,
        x=x,
        y=y,
        x_ticks=ticks(x, "short", None, 8),
        y_ticks=latency_ticks(y, 4),
        note=f"Loads along the lines: {loads} {unit}.",
    )
    return [drawn(plot)]
