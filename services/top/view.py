"""Draws a frame with rich. Columns that do not fit the terminal are left out, the least important first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.top.frame import SILENT, Frame, GroupLine, SeatLine, WorkerLine
from services.top.latency import Quantiles

LineT = TypeVar("LineT")
_GAP = 2
_MAX_GROUPS = 8
_MAX_NAME = 32
_FIXED_LINES = 15
"""Six lines above the tables, and of each of three tables a title, a blank line and a count of lines left out."""
_STYLES = {
    "ready": "green",
    "up": "green",
    "loading": "yellow",
    "waiting": "yellow",
    "leaving": "yellow",
    "gone": "red",
}


@dataclass(frozen=True, slots=True)
class _Column(Generic[LineT]):
    """A column of ``width`` characters, to which text is cut. ``shown`` says for which lines it is needed: without any
    of them it is left out."""

    title: str
    width: int
    text: Callable[[LineT], str]
    right: bool = True
    shown: Callable[[LineT], bool] = lambda _: True


def view(frame: Frame, width: int, height: int | None = None) -> RenderableType:
    """Return the frame for a terminal of ``width`` columns and ``height`` lines; None: as many lines as it takes."""
    spare = None if height is None else height - _FIXED_LINES - min(len(frame.groups), _MAX_GROUPS)
    workers = len(frame.workers) if spare is None else max(1, min(len(frame.workers), spare // 2))
    seats = None if spare is None else max(1, spare - workers)
    if frame.problem and frame.age_s is None:
        return Group(*_head(frame))
    return Group(
        *_head(frame),
        Text(),
        *_table(_WORKERS, frame.workers, width, workers, "no attention workers"),
        Text(),
        *_table(_SEATS, frame.seats, width, seats, "no expert workers: the experts are in the attention workers"),
        *((Text(), *_table(_GROUPS, frame.groups, width, _MAX_GROUPS, "")) if frame.groups else ()),
    )


def _head(frame: Frame) -> list[Text]:
    lines = []
    if frame.problem:
        age = "" if frame.age_s is None else f" (below is what it said {frame.age_s:.0f} s ago)"
        lines.append(Text(f"REDIS IS AWAY{age}: {frame.problem}", style="bold red"))
    if frame.problem and frame.age_s is None:
        return lines
    if frame.sleep:
        lines.append(Text(f"ASLEEP at level {frame.sleep}; POST /wake_up wakes the model", style="bold yellow"))
    lines.append(
        _facts(
            {
                "output tokens/s": _number(frame.output_tokens_per_s),
                "prompt tokens/s": _number(frame.prompt_tokens_per_s),
                "KV tokens": _part(frame.kv_used_tokens, frame.kv_tokens, " of "),
            }
        )
    )
    latencies = {"TTFT": frame.ttft, "TPOT": frame.tpot, "ITL": frame.itl}
    lines.append(_facts({name: _latency(each) for name, each in latencies.items()} | {"(p50/p90)": ""}))
    lines.append(
        _facts(
            {
                "queue": f"{_number(frame.queued)} requests, {_number(frame.queued_tokens)} tokens",
                "running": _number(frame.running),
                "dead letters": _number(frame.dead_letters),
            }
        )
    )
    if frame.seats or frame.epoch:
        experts = {
            "table epoch": str(frame.epoch),
            "rows in flight": _number(frame.rows_in_flight),
            "imbalance (max/mean)": "-" if frame.imbalance is None else f"{frame.imbalance:.2f}",
        }
        lines.append(_facts(experts))
    return lines


def _facts(facts: Mapping[str, str]) -> Text:
    parts = (Text.assemble((name, "dim"), " " if value else "", (value, "bold")) for name, value in facts.items())
    return Text("   ").join(parts)


def _table(
    columns: Sequence[_Column[LineT]], lines: Sequence[LineT], width: int, limit: int | None, empty: str
) -> list[RenderableType]:
    if not lines:
        return [Text(empty, style="dim")]
    first, *others = (column for column in columns if any(map(column.shown, lines)))
    longest = max(len(first.title), *(len(first.text(line)) for line in lines))
    shown = _fitting([replace(first, width=min(longest, _MAX_NAME)), *others], width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in shown:
        justify, size = ("right" if column.right else "left"), min(column.width, width)
        table.add_column(column.title, justify=justify, width=size, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for line in lines[:limit]:
        table.add_row(*(_styled(column.text(line)) for column in shown))
    left = len(lines) - len(lines[:limit])
    return [table, *([Text(f"... and {left} more", style="dim")] if left else [])]


def _fitting(columns: Sequence[_Column[LineT]], width: int) -> list[_Column[LineT]]:
    """Return the first columns that fit ``width``; one at least."""
    taken: list[_Column[LineT]] = []
    used = 0
    for column in columns:
        used += column.width + _GAP
        if taken and used - _GAP > width:
            break
        taken.append(column)
    return taken


def _styled(text: str) -> Text:
    first = text.split(",")[0]
    return Text(text, style="red" if SILENT in text else _STYLES.get(first, ""))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _part(used: float | None, whole: float | None, of: str = "/") -> str:
    if used is None or whole is None:
        return "-"
    return f"{used:,.0f}{of}{whole:,.0f}" if whole < 1e6 else f"{used / 1e6:.2f}{of}{whole / 1e6:.2f} M"


def _gib(used: float | None, whole: float | None) -> str:
    return "-" if used is None or whole is None else f"{used / 2**30:.1f}/{whole / 2**30:.1f}"


def _latency(latency: Quantiles | None) -> str:
    return "-" if latency is None else f"{_ms(latency.p50_s)}/{_ms(latency.p90_s)} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.{1 if seconds < 0.01 else 0}f}"


_WORKERS: tuple[_Column[WorkerLine], ...] = (
    _Column("attention", _MAX_NAME, lambda line: line.name, right=False),
    _Column("tokens/s", 8, lambda line: _number(line.output_tokens_per_s)),
    _Column("running", 7, lambda line: _number(line.running)),
    _Column("waiting", 7, lambda line: _number(line.waiting)),
    _Column("status", 9, lambda line: line.status, right=False),
    _Column("KV tokens", 15, lambda line: _part(line.kv_used_tokens, line.kv_tokens)),
    _Column(
        "GPU GiB",
        11,
        lambda line: _gib(line.gpu_used_bytes, line.gpu_bytes),
        shown=lambda line: line.gpu_bytes is not None,
    ),
    _Column("assigned", 8, lambda line: _number(line.assigned)),
    _Column("waits", 5, lambda line: _share(line.waits)),
    _Column("host", 24, lambda line: line.place, right=False),
    _Column("worker", 32, lambda line: line.worker, right=False, shown=lambda line: line.worker != line.name),
)
_SEATS: tuple[_Column[SeatLine], ...] = (
    _Column("experts", _MAX_NAME, lambda line: line.name, right=False),
    _Column("group", 5, lambda line: "-" if line.group is None else str(line.group)),
    _Column("rows/s", 8, lambda line: _number(line.rows_per_s)),
    _Column("status", 19, lambda line: line.status, right=False),
    _Column("busy", 5, lambda line: _share(line.busy)),
    _Column("in flight", 9, lambda line: _number(line.in_flight)),
    _Column(
        "GPU GiB",
        11,
        lambda line: _gib(line.gpu_used_bytes, line.gpu_bytes),
        shown=lambda line: line.gpu_bytes is not None,
    ),
    _Column("seat", 9, lambda line: str(line.seat)),
    _Column("address", 24, lambda line: line.place, right=False),
    _Column("worker", 32, lambda line: line.worker, right=False, shown=lambda line: line.worker != line.name),
)
_GROUPS: tuple[_Column[GroupLine], ...] = (
    _Column("shard", 9, lambda line: str(line.group)),
    _Column("seats", 5, lambda line: str(line.seats)),
    _Column("rows/s", 8, lambda line: _number(line.rows_per_s)),
    _Column("share of rows", 13, lambda line: _share(line.share)),
)
