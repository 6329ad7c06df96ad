"""Turns two readings into what is shown: numbers and words, one line per worker. No terminal here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.queue.scheduler_side import WorkerState
from services.queue.seats import SeatState
from services.routing import Seat
from services.runtime import printable
from services.top.readings import Reading, rate

AWAY = "no metrics"


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatLine:
    """An expert worker. ``rows_per_s`` and ``busy`` (share of the time) need two readings; None: they are not known."""

    seat: int
    group: int | None
    status: str
    rows_per_s: float | None = None
    busy: float | None = None
    in_flight: int | None = None
    place: str = ""
    worker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLine:
    """An attention worker. ``waits`` is the share of its time that it waits for experts."""

    worker: str
    status: str
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    kv: float | None = None
    waits: float | None = None
    assigned: int = 0
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLine:
    """A shard group. ``share``: its part of all rows that expert workers computed between the readings."""

    group: int
    seats: int
    rows_per_s: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """All that is shown. ``imbalance``: rows of the most loaded seat over those of the mean seat; None without load.
    ``age_s``: time since Redis answered; None: it never did."""

    problem: str
    age_s: float | None
    epoch: int
    queued: int | None
    queued_tokens: int | None
    dead_letters: int | None
    in_flight: int
    tokens_per_s: float | None
    imbalance: float | None
    groups: Sequence[GroupLine]
    seats: Sequence[SeatLine]
    workers: Sequence[WorkerLine]


def frame(before: Reading | None, now: Reading) -> Frame:
    """Return the frame of a reading; ``before`` is an earlier one, for rates."""
    seats = [*(_seat_line(state, before, now) for state in now.seats), *_gone(now)]
    workers = [_worker_line(state, before, now) for state in now.workers]
    loads = [line.rows_per_s for line in seats if line.rows_per_s is not None and line.status == "ready"]
    speeds = [line.tokens_per_s for line in workers if line.tokens_per_s is not None]
    return Frame(
        problem=now.problem,
        age_s=now.at_s - now.redis_at_s if now.redis_at_s else None,
        epoch=now.table.epoch if now.table else 0,
        queued=now.depth.requests if now.depth else None,
        queued_tokens=now.depth.tokens if now.depth else None,
        dead_letters=now.depth.dead_letters if now.depth else None,
        in_flight=sum(line.in_flight or 0 for line in seats),
        tokens_per_s=sum(speeds) if speeds else None,
        imbalance=max(loads) * len(loads) / sum(loads) if sum(loads) > 0 else None,
        groups=_groups(now, seats),
        seats=seats,
        workers=workers,
    )


def _seat_line(state: SeatState, before: Reading | None, now: Reading) -> SeatLine:
    info, page = state.info, now.pages.get(state.info.id)
    listed = now.table is not None and any(seat.number == state.number for seat in now.table.seats)
    words = [state.status, *([] if listed or state.status != "ready" else ["not in table"])]
    words += [] if page is not None else [AWAY]
    in_flight = page.get("experts_rows_in_flight") if page else None
    return SeatLine(
        seat=state.number,
        group=state.report.group,
        status=", ".join(words),
        rows_per_s=rate("experts_rows_total", info.id, before, now),
        busy=rate("experts_busy_seconds_total", info.id, before, now),
        in_flight=state.report.outstanding_rows if in_flight is None else int(in_flight),
        place=printable(f"{info.node or info.host}:{info.port}"),
        worker=printable(info.id),
    )


def _gone(now: Reading) -> list[SeatLine]:
    """Return the seats of the table that Redis lists no more: the next table will be without them."""
    known = {state.number for state in now.seats}
    gone: list[Seat] = [seat for seat in (now.table.seats if now.table else ()) if seat.number not in known]
    return [
        SeatLine(
            seat=seat.number,
            group=seat.group,
            status="gone",
            place=printable(f"{seat.node or seat.host}:{seat.port}"),
            worker=seat.worker,
        )
        for seat in gone
    ]


def _worker_line(state: WorkerState, before: Reading | None, now: Reading) -> WorkerLine:
    info, page = state.info, now.pages.get(state.info.id)
    numbers = page or {}
    return WorkerLine(
        worker=printable(info.id),
        status="up" if page is not None else AWAY,
        running=_whole(numbers.get("requests_running")),
        waiting=_whole(numbers.get("requests_waiting")),
        tokens_per_s=rate("decode_tokens_total", info.id, before, now),
        kv=numbers.get("kv_cache_usage_ratio"),
        waits=rate("exchange_wait_seconds_total", info.id, before, now),
        assigned=state.outstanding_requests,
        place=printable(info.host),
    )


def _groups(now: Reading, seats: Sequence[SeatLine]) -> list[GroupLine]:
    if now.table is None:
        return []
    total = sum(line.rows_per_s or 0.0 for line in seats)
    lines = []
    for number, listed in now.table.seats_of.items():
        known = [line.rows_per_s for line in seats if line.group == number and line.rows_per_s is not None]
        load = sum(known) if known else None
        share = load / total if load is not None and total else None
        lines.append(GroupLine(group=number, seats=len(listed), rows_per_s=load, share=share))
    return lines


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
