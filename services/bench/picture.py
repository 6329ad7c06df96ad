"""A report as a picture, drawn as the load generator draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.report.plots import Curve, Plot, latency_ticks
from loadgen.report.svg import picture
from services.bench import latency, throughput
from services.bench.report import Report
from services.dashboards.axes import Scale, Tick, scale, ticks
from services.errors import ConfigError

if TYPE_CHECKING:
    from services.bench.serve import Sample

COLORS = ("#1971c2", "#d9580d")
"""Of the sides, ours first."""
_TICKS = 5


def check(path: Path | None) -> None:
    """Raises ConfigError: ``path`` is of a kind that is not drawn."""
    if path is not None and path.suffix != ".svg":
        raise ConfigError(
            f"{path} is no name of a picture that can be drawn.",
            hint="Give one that ends in .svg; a browser or a converter makes a PNG of it.",
        )


def drawn(report: Report) -> str:
    """Returns SVG."""
    sides = dict(zip(report.sides, COLORS, strict=False))
    plots: Sequence[Plot]
    if report.kind == "latency":
        plots = _latency(report.samples, sides)
    elif report.kind == "throughput":
        plots = _throughput(report.samples, sides)
    else:
        plots = _serve(report.samples, sides)
    return picture(plots, f"{report.model}: {report.workload}")


def _latency(samples: Sequence[latency.Sample], sides: dict[str, str]) -> list[Plot]:
    steps = _by_batch(samples, sides, "decode_ms", "Time of a decode step by batch, ms")
    return [steps, _by_batch(samples, sides, "prefill_tokens_s", "Prompt tokens a second by batch")]


def _by_batch(samples: Sequence[latency.Sample], sides: dict[str, str], name: str, title: str) -> Plot:
    """Returns a line of medians for each side, and a dot for each sample."""
    batches = list(dict.fromkeys(sample.batch for sample in samples))
    x = _places(len(batches))
    curves = []
    for side, color in sides.items():
        line = [(float(batches.index(batch)), value) for batch, value in latency.medians(samples, side, name).items()]
        dots = [(float(batches.index(each.batch)), float(getattr(each, name))) for each in samples if each.side == side]
        curves += [
            Curve(name=f"{side}, median", points=line, color=color),
            Curve(name=f"{side}, each round", points=dots, color=color, kind="dots"),
        ]
    marks = [Tick(at=x.share(place), label=str(batch)) for place, batch in enumerate(batches)]
    return _plot(title, curves, x, marks)


def _throughput(samples: Sequence[throughput.Sample], sides: dict[str, str]) -> list[Plot]:
    """Returns a bar for each round, and which requests had ended by when in the first round of sides that say it."""
    x = _places(len(samples))
    names = [Tick(at=x.share(place), label=str(sample.number + 1)) for place, sample in enumerate(samples)]
    bars = []
    for side, color in sides.items():
        points = [
            (place - 0.35, sample.output_tokens / sample.seconds)
            for place, sample in enumerate(samples)
            if sample.side == side
        ]
        bars.append(Curve(name=side, points=points, color=color, kind="bars", width=0.7))
    ended = [
        Curve(name=side, points=_climb(sample.finished_s), color=color, kind="steps")
        for side, color in sides.items()
        for sample in samples
        if (sample.side, sample.number) == (side, 0) and sample.finished_s
    ]
    plots = [_plot("Output tokens a second by round", bars, x, names)]
    if ended:
        seconds = scale([at for curve in ended for at, _ in curve.points], from_zero=True)
        plots.append(_plot("Requests that had ended, over seconds", ended, seconds, ticks(seconds, "none", None, 6)))
    return plots


def _climb(moments: Sequence[float]) -> list[tuple[float, float]]:
    return [(at, float(number)) for number, at in enumerate(moments, start=1)]


def _serve(samples: Sequence[Sample], sides: dict[str, str]) -> list[Plot]:
    from loadgen.report.distribution import counted, cumulative

    plots = []
    for metric, title in (("ttft", "Share of requests whose TTFT is not above"), ("itl", "Share of gaps not above")):
        found = {each.side: each.run.latency[metric] for each in samples if metric in each.run.latency}
        curves = [
            Curve(name=side, points=cumulative(counted(value)), color=sides[side], kind="steps")
            for side, value in found.items()
            if value.count
        ]
        if curves:
            x = scale([value for curve in curves for value, _ in curve.points], log=10)
            y = Scale(low=0.0, high=1.0)
            plots.append(
                Plot(
                    title=title,
                    curves=curves,
                    x=x,
                    y=y,
                    x_ticks=latency_ticks(x, _TICKS),
                    y_ticks=ticks(y, "percentunit", None, _TICKS),
                )
            )
    return plots


def _places(count: int) -> Scale:
    return Scale(low=-0.5, high=max(count, 1) - 0.5)


def _plot(title: str, curves: Sequence[Curve], x: Scale, x_ticks: Sequence[Tick]) -> Plot:
    y = scale([top for curve in curves for top in curve.tops()], from_zero=True)
    return Plot(title=title, curves=curves, x=x, y=y, x_ticks=x_ticks, y_ticks=ticks(y, "short", None, _TICKS))
