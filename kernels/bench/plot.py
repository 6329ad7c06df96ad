"""One SVG per op, shape and dtype: microseconds over rows, both logarithmic, for the floor, us and the peers.

Plain SVG text: seven points a line need no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from bench.results import Row

Points = list[tuple[float, float]]

WIDTH: Final = 640
HEIGHT: Final = 400
MARGIN: Final = 60
SVG: Final = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
COLOURS: Final = {"floor": "#888888", "ours": "#d62728", "vllm": "#1f77b4", "vllm_marlin": "#1f77b4"}
OTHERS: Final = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2")


def write(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Writes ``OP-SHAPE-DTYPE.svg`` for every group with at least two rows counts; returns the paths."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype), []).append(row)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for names, members in groups.items():
        if len({row.rows for row in members if row.timing}) > 1:
            path = directory / ("-".join(names).replace("/", "_") + ".svg")
            path.write_text(svg(" ".join(names), lines_of(members)))
            paths.append(path)
    return paths


def lines_of(rows: Sequence[Row]) -> dict[str, Points]:
    lines: dict[str, Points] = {"floor": sorted({(row.rows, row.floor_us) for row in rows if row.floor_us})}
    for row in rows:
        if row.timing:
            lines.setdefault(row.provider, []).append((row.rows, row.timing.p50))
    return {name: sorted(points) for name, points in lines.items() if points}


def svg(title: str, lines: Mapping[str, Points]) -> str:
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_axis, y_axis = _Axis(min(xs), max(xs), MARGIN, WIDTH - 110), _Axis(min(ys), max(ys), HEIGHT - MARGIN, 40)
    parts = [
        f'{SVG} font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="22" font-size="14">{escape(title)}: microseconds over rows</text>',
        *(_tick(x_axis.at(x), HEIGHT - MARGIN + 16, f"{x:g}") for x in sorted(set(xs))),
        *(_rule(y_axis.at(y), f"{y:g}") for y in y_axis.decades()),
    ]
    others = iter(OTHERS * len(lines))
    for name, points in lines.items():
        parts += _line(name, points, x_axis, y_axis, COLOURS.get(name) or next(others))
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Maps ``low..high`` to pixels by the logarithm."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._high = math.log10(low), max(math.log10(high), math.log10(low) + 1e-9)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)

    def decades(self) -> list[float]:
        """Powers of ten inside the range. Example: 20..5000: 100, 1000."""
        return [10.0**power for power in range(math.ceil(self._low), math.floor(self._high) + 1)]


def _tick(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>'


def _rule(y: float, text: str) -> str:
    line = f'<line x1="{MARGIN}" x2="{WIDTH - 110}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
    return f'{line}<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'


def _line(name: str, points: Points, x_axis: _Axis, y_axis: _Axis, colour: str) -> list[str]:
    path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if name == "floor" else ""
    last_x, last_y = points[-1]
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
        f'<text x="{x_axis.at(last_x) + 6:.1f}" y="{y_axis.at(last_y) + 4:.1f}" fill="{colour}">{escape(name)}</text>',
    ]
