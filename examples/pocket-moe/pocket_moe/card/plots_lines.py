"""Loss curves and loads in, their pictures out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pocket_moe.card.plots import COLOURS, Picture, Scale, steps

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 380, 52, 96, 48, 44
_MARGIN = 0.1  # above the highest held-out loss, of the range below it
Curve = Sequence[tuple[float, float]]


def loss_curves(training: Mapping[str, Curve], heldout: Mapping[str, Curve]) -> str:
    """Nats per token over millions of tokens, by model: faint for training, strong for the held-out split."""
    picture = Picture(_WIDTH, _HEIGHT, "Loss over training tokens")
    everything = [point for curves in (training, heldout) for curve in curves.values() for point in curve]
    tokens, losses = [x for x, _ in everything], [y for _, y in everything]
    low, top = min(losses), _top(heldout, losses)
    x_axis = Scale(0, max(tokens), _LEFT, _WIDTH - _RIGHT)
    y_axis = Scale(low, top, _HEIGHT - _BOTTOM, _TOP)
    picture.text(_LEFT, 20, "Loss in nats per token over millions of training tokens", size=15)
    picture.text(_LEFT, 36, "strong: held-out split, faint: training", style="mild")
    _axes(picture, x_axis, y_axis, max(tokens), (low, top))
    picture.clip("plot", _LEFT, _TOP, _WIDTH - _RIGHT - _LEFT, _HEIGHT - _BOTTOM - _TOP)
    for style, (name, curve) in zip(COLOURS, training.items(), strict=False):
        picture.line([(x_axis.at(x), y_axis.at(y)) for x, y in curve], style=style, faint=True, window="plot")
        strong = [(x_axis.at(x), y_axis.at(y)) for x, y in heldout.get(name, ())]
        if strong:
            picture.line(strong, style=style)
        end = strong[-1][1] if strong else y_axis.at(curve[-1][1])
        shift = 8 if style == COLOURS[0] else 0  # two models that end close together
        picture.text(_WIDTH - _RIGHT + 6, end + shift, name, style=f"name {style}")
    return picture.svg()


def peaks(load: Mapping[str, Any]) -> str:
    """Max over mean expert load by domain: a bar for the mean over layers, a mark for the worst layer."""
    rows = sorted(load["domains"], key=lambda name: -_mean(load["peak"][name]))
    worst = max(max(load["peak"][name]) for name in rows)
    left, line = 96, 16
    picture = Picture(640, 66 + line * (len(rows) + 1), "Max over mean expert load by domain")
    picture.text(left, 20, "Max over mean load of the experts, by domain", size=15)
    picture.text(left, 36, "bar: mean over layers, line: the worst layer; 1 is an even load", style="mild")
    scale = Scale(0, worst, left, 590)
    picture.rule(scale.at(1), 44, scale.at(1), 48 + line * (len(rows) + 1))
    named = [(name, load["peak"][name]) for name in rows] + [("all together", load["peak_of_all"])]
    for row, (name, peaks_L) in enumerate(named):
        y, style = 48 + row * line, "a" if row < len(rows) else "b"
        picture.text(left - 6, y + 10, name, size=10, anchor="end")
        picture.bar(left, y, scale.at(_mean(peaks_L)) - left, line - 4, style=style, opacity=0.75)
        picture.bar(scale.at(max(peaks_L)) - 1, y, 2, line - 4, style=style)
        picture.text(scale.at(_mean(peaks_L)) - 4, y + 9.5, f"{_mean(peaks_L):.2f}", size=10, anchor="end", style="on")
        picture.text(scale.at(max(peaks_L)) + 5, y + 9.5, f"{max(peaks_L):.2f}", size=10, style="mild")
    return picture.svg()


def _axes(picture: Picture, x_axis: Scale, y_axis: Scale, tokens: float, losses: tuple[float, float]) -> None:
    for value in steps(*losses, 6):
        picture.rule(_LEFT, y_axis.at(value), _WIDTH - _RIGHT, y_axis.at(value))
        picture.text(_LEFT - 6, y_axis.at(value) + 4, f"{value:g}", anchor="end", style="mild")
    for value in steps(0, tokens, 6):
        picture.text(x_axis.at(value), _HEIGHT - _BOTTOM + 18, f"{value:g}", anchor="middle", style="mild")


def _top(heldout: Mapping[str, Curve], losses: Sequence[float]) -> float:
    """All held-out losses fit. The first steps' training loss, far above all that follows, is cut off."""
    highest = max((y for curve in heldout.values() for _, y in curve), default=max(losses))
    return highest + _MARGIN * (highest - min(losses))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
