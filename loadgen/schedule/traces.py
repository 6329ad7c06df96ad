"""Recorded loads: when requests came, and how long they and their answers were.

Three forms are known by their content. Mooncake: a line of JSON for each request, with ``timestamp`` (ms),
``input_length``, ``output_length`` and ``hash_ids``, a number for each block of 512 tokens of the prompt; equal numbers
are equal blocks. BurstGPT: CSV with Timestamp (s), Request tokens, Response tokens. A day: CSV with a row for each
minute (:mod:`services.planner.day.trace`), whose requests are drawn.
"""

from __future__ import annotations

import csv
import math
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadgen.errors import FileUnusable
from loadgen.schedule.curve import Piece, RateCurve
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import Schedule, arrivals
from services.errors import ConfigError
from services.planner.day.trace import MINUTE, Minute, Trace, read_trace

BLOCK_TOKENS = 512
"""Of Mooncake's prompts, for each of ``hash_ids``."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request's lengths in tokens. ``blocks``: names of the prompt's blocks. ``topic``: what it was about."""

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """A schedule, and the request of each of its times."""

    schedule: Schedule
    requests: Sequence[Recorded]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What of a trace is replayed: from second ``begin`` to ``end`` of its own time, ``speed`` times as fast, at most
    ``requests``. A day's rates are multiplied by ``scale``, so that a small server can have a large one's day."""

    begin: float = 0.0
    end: float = math.inf
    speed: float = 1.0
    scale: float = 1.0
    requests: int | None = None


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_replay(path: Path, cut: Cut, *, seed: int) -> Replay:
    """Returns the load of a file.

    Raises:
        FileUnusable: there is no such file, it is of no known form, or nothing of it is within the cut.
    """
    try:
        with path.expanduser().open(encoding="utf-8-sig") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise FileUnusable(f"Cannot read the trace {path}: {error}.") from error
    names = [name.strip() for name in first.split(",")]
    if first.lstrip().startswith("{"):
        return _replay(_mooncake(path), cut, f"Mooncake's trace {path.name}")
    if "Timestamp" in names and "Request tokens" in names:
        return _replay(_burst_gpt(path), cut, f"BurstGPT's trace {path.name}")
    if MINUTE in names:
        return _day(path, cut, seed)
    raise FileUnusable(
        f"{path} is of no known form.", hint="Mooncake's JSON lines, BurstGPT's CSV and days of minutes are known."
    )


def _mooncake(path: Path) -> Iterable[tuple[float, Recorded]]:
    decoder = msgspec.json.Decoder(_Mooncake)
    with path.expanduser().open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                each = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise FileUnusable(f"{path}, line {number}: {error}.") from error
            yield each.timestamp / 1e3, Recorded(each.input_length, each.output_length, tuple(each.hash_ids))


def _burst_gpt(path: Path) -> Iterable[tuple[float, Recorded]]:
    with path.expanduser().open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                moment = float(row["Timestamp"])
                lengths = int(float(row["Request tokens"])), int(float(row["Response tokens"]))
            except (KeyError, TypeError, ValueError) as error:
                raise FileUnusable(f"{path}, line {number}: a time or a length is missing or no number.") from error
            if lengths[1] > 0:  # 0: a request that failed when it was recorded
                yield moment, Recorded(max(1, lengths[0]), lengths[1])


def _replay(found: Iterable[tuple[float, Recorded]], cut: Cut, text: str) -> Replay:
    """Times count from the first request of the trace; those of the replay from the cut's begin."""
    every = sorted(found, key=lambda each: each[0])
    origin = every[0][0] if every else 0.0
    kept = [(moment - origin, what) for moment, what in every if cut.begin <= moment - origin < cut.end]
    kept = kept[: cut.requests]
    if not kept:
        raise FileUnusable(f"Nothing of {text} is within the part that was asked for.")
    times = array("d", ((moment - cut.begin) / cut.speed for moment, _ in kept))
    whole = every[-1][0] - origin if cut.requests is None else kept[-1][0]
    seconds = max((min(cut.end, whole) - cut.begin) / cut.speed, times[-1])
    text = f"{text}, {cut.speed:g} times as fast" if cut.speed != 1 else text
    return Replay(Schedule(kind="trace", text=text, times=times, seconds=seconds), [what for _, what in kept])


def _day(path: Path, cut: Cut, seed: int) -> Replay:
    try:
        trace = read_trace(path)
    except ConfigError as error:
        raise FileUnusable(error.message) from error
    minutes, pieces = [], []
    for number, minute in enumerate(trace.minutes):
        seconds = min(60.0 * (number + 1), cut.end) - max(60.0 * number, cut.begin)
        if seconds > 0:
            rate = minute.requests_per_s * cut.scale * cut.speed
            minutes.append(minute)
            pieces.append(Piece(seconds / cut.speed, rate, rate))
    if not sum(piece.arrivals for piece in pieces):
        raise FileUnusable(f"Nothing arrives in the part of {path} that was asked for.")
    curve = RateCurve(pieces, f"the day {path.name}, rates times {cut.scale:g}, {cut.speed:g} times as fast")
    schedule = arrivals(curve, Gaps(1.0), seed=seed, requests=cut.requests)
    rng = random.Random(f"lengths {seed}")
    return Replay(schedule, [_drawn(trace, minutes[curve.piece_at(moment)], rng) for moment in schedule.times])


def _drawn(trace: Trace, minute: Minute, rng: random.Random) -> Recorded:
    """Lengths are geometric, from 1 on: a mean is all that the file says."""
    topic = rng.choices(trace.topics, minute.topics)[0] if trace.topics else None
    return Recorded(_geometric(minute.prompt_tokens, rng), _geometric(minute.output_tokens, rng), topic=topic)


def _geometric(mean: float, rng: random.Random) -> int:
    if mean <= 1:
        return 1
    return 1 + int(math.log(1.0 - rng.random()) / math.log(1 - 1 / mean))
