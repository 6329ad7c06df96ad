"""Turns two readings into what is shown: numbers and words, one line per worker. No terminal here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from services.queue.scheduler_side import WorkerState
from services.queue.seats import SeatState
from services.routing import Seat
from services.runtime import printable
from services.top.latency import Quantiles, quantiles
from services.top.readings import Page, Reading, rate

SILENT = "no answer"
"""Status of a worker whose metrics page does not answer, though its lease lives."""
_DIGITS = 20
"""Digits to which numbers in names are filled up, to be sorted by their value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatLine:
    """An expert worker. ``name`` is its process's, as in logs and metrics. ``rows_per_s`` and ``busy`` (share of the
    time) need two readings; None: they are not known. So is the memory of a GPU where there is none."""

    name: str
    seat: int
    group: int | None
    status: str
    rows_per_s: float | None = None
    busy: float | None = None
    in_flight: int | None = None
    gpu_used_bytes: float | None = None
    gpu_bytes: float | None = None
    place: str = ""
    worker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLine:
    """An attention worker. ``name`` is its process's, as in logs and metrics. ``kv_used_tokens`` of its ``kv_tokens``
    belong to sequences in the batch; ``waits`` is the share of its time that it waits for experts."""

    name: str
    status: str
    kv_tokens: int
    running: int | None = None
    waiting: int | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    kv_used_tokens: int | None = None
    gpu_used_bytes: float | None = None
    gpu_bytes: float | None = None
    waits: float | None = None
    assigned: int = 0
    place: str = ""
    worker: str = ""


LineT = TypeVar("LineT", SeatLine, WorkerLine)


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
    ``age_s``: time since Redis answered; None: it never did. ``interval_s``: the time that rates and latencies are of.
    ``ttft``, ``tpot``, ``itl``: time to the first token, time per output token of requests that ended, and inter-token
    latency. The KV cache is that of workers that answer. ``sleep``: the level of the model's sleep; 0: it serves."""

    problem: str
    age_s: float | None
    epoch: int
    queued: int | None
    queued_tokens: int | None
    dead_letters: int | None
    interval_s: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    kv_used_tokens: int | None
    kv_tokens: int | None
    running: int | None
    rows_in_flight: int
    imbalance: float | None
    groups: Sequence[GroupLine]
    seats: Sequence[SeatLine]
    workers: Sequence[WorkerLine]
    sleep: int = 0


def frame(before: Reading | None, now: Reading) -> Frame:
    """Return the frame of a reading; ``before`` is an earlier one, for rates and latencies."""
    seats = _by_name([*(_seat_line(state, before, now) for state in now.seats), *_gone(now)])
    workers = _by_name([_worker_line(state, before, now) for state in now.workers])
    loads = [line.rows_per_s for line in seats if line.rows_per_s is not None and line.status == "ready"]
    earlier, heard = before.gateways if before else {}, [line for line in workers if line.kv_used_tokens is not None]
    return Frame(
        problem=now.problem,
        age_s=now.at_s - now.redis_at_s if now.redis_at_s else None,
        epoch=now.table.epoch if now.table else 0,
        queued=now.depth.requests if now.depth else None,
        queued_tokens=now.depth.tokens if now.depth else None,
        dead_letters=now.depth.dead_letters if now.depth else None,
        interval_s=now.at_s - before.at_s if before else None,
        output_tokens_per_s=_sum(line.output_tokens_per_s for line in workers),
        prompt_tokens_per_s=_sum(line.prompt_tokens_per_s for line in workers),
        ttft=quantiles(earlier, now.gateways, "ttft"),
        tpot=quantiles(earlier, now.gateways, "tpot"),
        itl=quantiles(earlier, now.gateways, "itl"),
        kv_used_tokens=_whole(_sum(line.kv_used_tokens for line in heard)),
        kv_tokens=_whole(_sum(line.kv_tokens for line in heard)),
        running=_whole(_sum(line.running for line in workers)),
        rows_in_flight=sum(line.in_flight or 0 for line in seats),
        imbalance=max(loads) * len(loads) / sum(loads) if sum(loads) > 0 else None,
        groups=_groups(now, seats),
        seats=seats,
        workers=workers,
        sleep=now.sleep,
    )


def _by_name(lines: Sequence[LineT]) -> list[LineT]:
    """Return ``lines`` by name, experts-2 before experts-10. Names that several have, for each machine may have an
    experts-0, get the place added."""
    counts = Counter(line.name for line in lines)
    distinct = [replace(line, name=f"{line.name} {line.place}") if counts[line.name] > 1 else line for line in lines]
    return sorted(distinct, key=lambda line: [part.zfill(_DIGITS) for part in re.split(r"(\d+)", line.name)])


def _seat_line(state: SeatState, before: Reading | None, now: Reading) -> SeatLine:
    info, page = state.info, now.pages.get(state.info.id)
    listed = now.table is not None and any(seat.number == state.number for seat in now.table.seats)
    words: list[str] = [] if page is None and state.status == "ready" else [state.status]
    words += [] if listed or state.status != "ready" else ["not in table"]
    words += [] if page is not None else [SILENT]
    numbers = page or {}
    in_flight = numbers.get("experts_rows_in_flight")
    used, size = _gpu_memory("experts_gpu_memory_bytes", numbers)
    return SeatLine(
        name=printable(info.name),
        seat=state.number,
        group=state.report.group,
        status=", ".join(words),
        rows_per_s=rate("experts_rows_total", info.id, before, now),
        busy=rate("experts_busy_seconds_total", info.id, before, now),
        in_flight=state.report.outstanding_rows if in_flight is None else int(in_flight),
        gpu_used_bytes=used,
        gpu_bytes=size,
        place=printable(f"{info.node or info.host}:{info.port}"),
        worker=printable(info.id),
    )


def _gone(now: Reading) -> list[SeatLine]:
    """Return the seats of the table that Redis lists no more: the next table will be without them."""
    known = {state.number for state in now.seats}
    gone: list[Seat] = [seat for seat in (now.table.seats if now.table else ()) if seat.number not in known]
    return [
        SeatLine(
            name=printable(seat.name),
            seat=seat.number,
            group=seat.group,
            status="gone",
            place=printable(f"{seat.node or seat.host}:{seat.port}"),
            worker=printable(seat.worker),
        )
        for seat in gone
    ]


def _worker_line(state: WorkerState, before: Reading | None, now: Reading) -> WorkerLine:
    info, page = state.info, now.pages.get(state.info.id)
    numbers = page or {}
    usage = numbers.get("kv_cache_usage_ratio")
    used, size = _gpu_memory("gpu_memory_bytes", numbers)
    return WorkerLine(
        name=printable(info.name),
        status="up" if page is not None else SILENT,
        kv_tokens=info.kv_tokens,
        running=_whole(numbers.get("requests_running")),
        waiting=_whole(numbers.get("requests_waiting")),
        output_tokens_per_s=rate("decode_tokens_total", info.id, before, now),
        prompt_tokens_per_s=rate("prefill_tokens_total", info.id, before, now),
        kv_used_tokens=None if usage is None else round(usage * info.kv_tokens),
        gpu_used_bytes=used,
        gpu_bytes=size,
        waits=rate("exchange_wait_seconds_total", info.id, before, now),
        assigned=state.outstanding_requests,
        place=printable(info.host),
        worker=printable(info.id),
    )


def _gpu_memory(series: str, page: Page) -> tuple[float | None, float | None]:
    """Return how much of a worker's GPU memory is used, and how much there is."""
    return page.get(f"{series}/used"), page.get(series)


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


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None where there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
