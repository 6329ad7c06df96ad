"""One SVG per op, shape and dtype: microseconds over rows, both logarithmic, for the floor, us and the peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.pictures import BLUE, GREEN, MILD, ORANGE, PINK, figure, picture
from bench.results import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]

COLOURS: Final = {"floor": MILD, "ours": ORANGE, "vllm": BLUE, "vllm_marlin": BLUE}
OTHERS: Final = (GREEN, PINK)
MARKERS: Final = "os^Dv"


def write(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Writes :func:`pictures` there; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in pictures(rows):
        (directory / name).write_text(text, encoding="utf-8")
        paths.append(directory / name)
    return paths


def pictures(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """``OP-SHAPE-DTYPE.svg`` and its text, for every group with at least two rows counts."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.shape, row.dtype), []).append(row)
    for names, members in groups.items():
        if len({row.rows for row in members if row.timing}) > 1:
            yield "-".join(names).replace("/", "_") + ".svg", over_rows(" ".join(names), lines_of(members))


def lines_of(rows: Sequence[Row]) -> dict[str, Points]:
    lines: dict[str, Points] = {"floor": sorted({(row.rows, row.floor_us) for row in rows if row.floor_us})}
    for row in rows:
        if row.timing:
            lines.setdefault(row.provider, []).append((row.rows, row.timing.p50))
    return {name: sorted(points) for name, points in lines.items() if points}


@picture
def over_rows(title: str, lines: Mapping[str, Points]) -> Figure:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    drawn = figure(6.4, 4, title)
    axes = drawn.subplots()
    others, markers = iter(OTHERS * len(lines)), iter(MARKERS * len(lines))
    for name, points in lines.items():
        rows, microseconds = zip(*points, strict=True)
        colour = COLOURS.get(name) or next(others)
        shape = {"linestyle": "--"} if name == "floor" else {"marker": next(markers), "markersize": "4"}
        axes.plot(rows, microseconds, color=colour, label=name, **shape)  # type: ignore[arg-type]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    measured = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(measured[:: 1 + len(measured) // 12])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("rows")
    axes.set_title("median microseconds of a call")
    drawn.legend(loc="outside right upper")
    return drawn
