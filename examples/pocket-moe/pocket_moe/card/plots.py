"""Shapes and numbers in, SVG text out that reads on a light page and on a dark one.

Plain text instead of a plotting library: the pictures are small, and the same numbers always give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, Literal

Anchor = Literal["start", "middle", "end"]

COLOURS: Final = ("a", "b", "c", "d")
"""Classes of the series' colours."""
_LIGHT: Final = ("#1f2328", "#59636e", "#d1d9e0", "#d1442a", "#1f6feb", "#2da44e", "#8250df")
_DARK: Final = ("#e6edf3", "#9198a1", "#3d444d", "#ff7b54", "#58a6ff", "#56d364", "#bc8cff")
"""Text, mild text, rules, then the series."""


def _rules(text: str, mild: str, rule: str, *series: str) -> str:
    colours = (
        f".line.{name} {{ stroke: {colour}; }} .area.{name}, .name.{name} {{ fill: {colour}; }}"
        for name, colour in zip(COLOURS, series, strict=True)
    )
    return "\n".join([f"text {{ fill: {text}; }} .mild {{ fill: {mild}; }} .rule {{ stroke: {rule}; }}", *colours])


_STYLE: Final = f"""<style>
text {{ font-family: system-ui, sans-serif; }}
.line {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; }}
{_rules(*_LIGHT)}
@media (prefers-color-scheme: dark) {{
{_rules(*_DARK)}
}}
text.on {{ fill: {_LIGHT[0]}; }}
</style>"""


class Picture:
    """Collects shapes; coordinates are pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._parts = [f"<title>{escape(title)}</title>", _STYLE]

    def text(self, x: float, y: float, text: str, *, size: int = 11, anchor: Anchor = "start", style: str = "") -> None:
        kind = f' class="{style}"' if style else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{place}{kind}>{escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, *, style: str, opacity: float = 1) -> None:
        see_through = "" if opacity >= 1 else f' fill-opacity="{opacity:.2f}"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} class="area {style}"{see_through}/>')

    def squares(self, corners: Sequence[tuple[int, int]], size: int, *, style: str, opacity: float) -> None:
        """Many of one colour in one shape, which takes a tenth of the bytes."""
        path = "".join(f"M{x} {y}h{size}v{size}h-{size}z" for x, y in corners)
        self._parts.append(f'<path d="{path}" class="area {style}" fill-opacity="{opacity:.2f}"/>')

    def rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {place} class="rule"/>')

    def clip(self, name: str, x: float, y: float, width: float, height: float) -> None:
        """A window for :meth:`line`: what is outside is not drawn."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<clipPath id="{name}"><rect {place}/></clipPath>')

    def line(self, points: Sequence[tuple[float, float]], *, style: str, faint: bool = False, window: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        opacity = ' stroke-opacity="0.4"' if faint else ""
        inside = f' clip-path="url(#{window})"' if window else ""
        self._parts.append(f'<polyline points="{path}" class="line {style}"{opacity}{inside}/>')

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        return "\n".join([head, *self._parts, "</svg>", ""])


class Scale:
    """Maps ``low..high`` to ``first..last`` pixels."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._span = low, max(high - low, 1e-12)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        return self._first + (value - self._low) / self._span * (self._last - self._first)


def steps(low: float, high: float, count: int) -> list[float]:
    """Round numbers inside the range, about ``count`` of them. Example: ``steps(0, 9, 5) == [0, 2, 4, 6, 8]``."""
    rough = max(high - low, 1e-12) / count
    power = 10.0 ** _floor_log10(rough)
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [index * size for index in range(first, last + 1)]


def _floor_log10(value: float) -> int:
    """Exact where the logarithm's rounding is not."""
    return int(f"{value:e}".partition("e")[2])
