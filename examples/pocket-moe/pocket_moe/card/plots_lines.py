"""Loss curves and loads in, their pictures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.pictures import BLUE, INK, MILD, ORANGE, SERIES, figure, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARGIN = 0.1  # above the highest held-out loss, of the range below it
Curve = Sequence[tuple[float, float]]


@picture
def loss_curves(training: Mapping[str, Curve], heldout: Mapping[str, Curve]) -> Figure:
    """Nats per token over millions of tokens, by model: thin for training, thick for the held-out split."""
    drawn = figure(7.6, 3.8, "Loss over training tokens")
    axes = drawn.subplots()
    for colour, (name, curve) in zip(SERIES, training.items(), strict=False):
        if heldout.get(name):
            label, line = f"{name}, held-out split", heldout[name]
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=2, marker="o", markersize=3, label=label)
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.9, alpha=0.8, label=f"{name}, training")
    losses = [y for curves in (training, heldout) for curve in curves.values() for _, y in curve]
    axes.set_ylim(min(losses) - 0.02 * (_top(heldout, losses) - min(losses)), _top(heldout, losses))
    axes.set_xlim(left=0)
    axes.set_xlabel("millions of training tokens")
    axes.set_title("nats per token")
    drawn.legend(loc="outside right upper")
    return drawn


@picture
def peaks(load: Mapping[str, Any]) -> Figure:
    """Max over mean expert load by domain: a bar for the mean over layers, a mark for the worst layer."""
    rows = sorted(load["domains"], key=lambda name: -_mean(load["peak"][name]))
    named = [(name, load["peak"][name]) for name in rows] + [("all together", load["peak_of_all"])]
    drawn = figure(6.6, 1.2 + 0.2 * len(named), "Max over mean load of the experts, by domain")
    axes = drawn.subplots()
    means, worst, places = [_mean(peak) for _, peak in named], [max(peak) for _, peak in named], range(len(named))
    colours = [BLUE] * len(rows) + [ORANGE]
    bars = axes.barh(places, means, height=0.7, color=colours, alpha=0.7, label="mean over layers")
    axes.bar_label(bars, fmt="%.2f", padding=3, color=INK)
    axes.scatter(worst, places, marker="D", s=16, color=colours, label="worst layer")
    for place, value in zip(places, worst, strict=True):
        axes.annotate(f"{value:.2f}", (value, place), (6, -3), textcoords="offset points", color=MILD)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(places, [name for name, _ in named], color=INK)
    axes.set_ylim(len(named) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * max(worst))
    axes.grid(visible=False)
    axes.set_title("bar: mean over layers, diamond: the worst layer; 1, the dotted line, is an even load")
    return drawn


def _top(heldout: Mapping[str, Curve], losses: Sequence[float]) -> float:
    """All held-out losses fit. The first steps' training loss, far above all that follows, is cut off."""
    highest = max((y for curve in heldout.values() for _, y in curve), default=max(losses))
    return highest + _MARGIN * (highest - min(losses))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
