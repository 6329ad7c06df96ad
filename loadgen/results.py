"""The results file of a measurement: what ``run``, ``search`` and ``sweep`` write, and what reports and diffs read.

A file is one JSON object; its member ``kind`` says which of the three structs it is. Durations end in ``_ms`` or
``_s``, moments in ``_at`` (Unix seconds) or ``at_s`` (seconds after the schedule began). What is not written has its
default. :func:`read` refuses files of a later form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from loadgen.errors import ResultsUnreadable

FORM = 1
"""Of the files that this release writes."""

Metric = Literal["ttft", "itl", "tpot", "e2e", "service_ttft", "service", "lag"]
"""ttft, e2e: from the time at which the request was scheduled; service_ttft, service: from when it was sent; tpot: a
request's time after its first token, over its other tokens; itl: gaps between chunks; lag: sent after scheduled."""
Outcome = Literal["ok", "wrong", "refused", "failed", "disconnected", "timeout", "unfinished"]
"""wrong: came whole, but is another answer than it must be. refused: 429 or 503, even after the retries. disconnected:
by this client, on purpose. unfinished: under way when the run was stopped. failed: any other end."""


class Latency(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A distribution. All figures come from ``histogram``, an HdrHistogram of microseconds with three digits in its
    compressed form (base64): those of two files can be added."""

    count: int
    mean_ms: float
    min_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p99_9_ms: float
    max_ms: float
    histogram: str


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server. ``server`` is its Server header, where it has one."""

    url: str
    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    stream: bool = True
    server: str | None = None


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When requests were due. ``rate``: mean of the schedule, a second; None where clients wait for answers (closed
    loop), whose number is ``concurrency`` then. ``text`` is the schedule in words."""

    kind: str
    text: str
    requests: int
    duration_s: float
    rate: float | None = None
    concurrency: int | None = None
    mean_gap_ms: float | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked. Tokens are means of what was asked for; ``text`` is the workload in words."""

    kind: str
    text: str
    prompt_tokens_mean: float | None = None
    output_tokens_mean: float | None = None


class Validity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the figures may be used. ``reasons`` say why not. ``lag_limit_ms``: what the 99th percentile of the send
    lag may be, None in a closed loop, which has no times to miss."""

    valid: bool
    lag_p99_ms: float
    lag_limit_ms: float | None = None
    reasons: list[str] = []
    warnings: list[str] = []


class Counts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests by their end, and what happened on the way. ``scheduled`` is the sum of the outcomes. Tries: ``retried``
    were sent again, ``refused_429`` and ``refused_503`` are answers of that status, ``retry_after`` those of them that
    said how long to wait, which was done."""

    scheduled: int
    ok: int = 0
    wrong: int = 0
    refused: int = 0
    failed: int = 0
    disconnected: int = 0
    timeout: int = 0
    unfinished: int = 0
    tries: int = 0
    retried: int = 0
    refused_429: int = 0
    refused_503: int = 0
    retry_after: int = 0
    connections: int = 0
    """TCP connections that were opened."""


class Rates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Per second, from the first sending to the last end. ``goodput``: right answers within all objectives, None where
    there are none."""

    requests: float
    output_tokens: float
    prompt_tokens: float | None = None
    goodput: float | None = None


class Objective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``metric`` in its ``percentile`` (0 to 100) at most ``target_ms``. ``low_ms`` and ``high_ms`` bound the value
    with the confidence of :class:`Search`, or 95 % (order statistics). ``met`` compares the value."""

    metric: Metric
    percentile: float
    target_ms: float
    value_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    met: bool | None = None
    share_within: float | None = None
    """Of all requests due, which were answered within the target; for itl of all gaps."""


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ends of one kind. ``kind``: a short word for it, such as ``http 500`` or ``ConnectionRefused``; ``example``: the
    message of the first."""

    kind: str
    count: int
    first_at_s: float
    last_at_s: float
    example: str
    status: int = 0


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of one tenant, priority or class of the workload. ``share``: its part of all output tokens."""

    name: str
    counts: Counts
    rates: Rates
    share: float
    latency: dict[Metric, Latency]
    weight: float = 1.0


class Fairness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Jain's index over the tenants of each tenant's output tokens a second over its weight: 1 is even, 1/tenants is
    one tenant alone. ``slowdown``: the same index over the tenants' mean TTFT."""

    tenants: int
    index: float
    slowdown: float | None = None


class WrongAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``differs_at``: number of the first token, or of the first character, that differs."""

    number: int
    expected: str
    found: str
    differs_at: int


class Correctness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers compared with those of ``reference``: a file's name, or ``serial run``. ``unknown``: requests that have
    no answer there."""

    reference: str
    checked: int
    wrong: int
    unknown: int = 0
    examples: list[WrongAnswer] = []


class Interval(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened from ``at_s`` on for ``seconds``. ``scheduled``, ``sent``, ``ok``, ``failed`` (with wrong, timeout
    and failed), ``refused`` (tries answered by 429 or 503), ``disconnected``, ``output_tokens`` are counts of the
    interval by the time at which it happened; ``ttft`` and ``e2e`` are those of requests that were *scheduled* in it,
    ``itl`` that of the gaps that ended in it, None where there was none. ``in_flight`` is the number at its end,
    ``backlog`` those of them that wait for their first token."""

    at_s: float
    seconds: float
    scheduled: int = 0
    sent: int = 0
    ok: int = 0
    failed: int = 0
    refused: int = 0
    disconnected: int = 0
    output_tokens: int = 0
    in_flight: int = 0
    backlog: int = 0
    lag_max_ms: float = 0.0
    ttft: Latency | None = None
    e2e: Latency | None = None
    itl: Latency | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that was done to the server: ``action`` to ``target``, as ``--event`` asked. It was due at ``at_s``,
    began at ``began_s`` and took until ``ended_s``. ``detail``: which process or pod it was, or what the command said.
    ``error``: why it did not happen."""

    at_s: float
    action: Literal["kill", "drain", "pause", "scale", "run"]
    target: str
    began_s: float | None = None
    ended_s: float | None = None
    detail: str = ""
    error: str | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a query's results. ``label`` has the values of its labels; ``points`` are pairs of seconds after the
    schedule began and the value."""

    label: str
    points: list[tuple[float, float]]


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What Prometheus answered to ``query`` for the time of the run. ``error``: why it did not."""

    name: str
    query: str
    unit: str = ""
    lines: list[Line] = []
    error: str | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times in seconds after the schedule began. ``request_id``: what the server called it."""

    number: int
    scheduled_s: float
    outcome: Outcome
    sent_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    tries: int = 1
    status: int = 0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    tenant: str | None = None
    priority: int | None = None
    name: str | None = None
    """Class of the workload: ``turn 3``, ``long``, a topic."""
    request_id: str | None = None
    error: str | None = None


class Shard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that sent a part of the schedule: ``started_at`` is when it began by its own clock."""

    index: int
    of: int
    requests: int
    lag_p99_ms: float
    started_at: float
    late_start_s: float = 0.0
    """By how much it began after the common beginning: its first requests were late by that."""


class CutShort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that a ``signal`` ended ``at_s`` seconds after its begin. ``unsent``: how many requests of the schedule had
    not been sent; None where nothing says how many there would have been."""

    signal: str
    at_s: float
    unsent: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="run", tag_field="kind"):
    """One run. ``began_at``: when second 0 of the schedule was, in Unix seconds; ``duration_s``: to the last end.
    ``slowest``: the ten requests with the largest ttft. ``settings``: the command's, as words. ``requests_file``: a
    file beside this one with a :class:`RequestRecord` a line."""

    form: int = FORM
    version: str
    label: str = ""
    target: Target
    schedule: Schedule
    workload: Workload
    began_at: float
    duration_s: float
    validity: Validity
    counts: Counts
    rates: Rates
    latency: dict[Metric, Latency]
    objectives: list[Objective] = []
    errors: list[ErrorGroup] = []
    tenants: list[Group] = []
    priorities: list[Group] = []
    classes: list[Group] = []
    fairness: Fairness | None = None
    correctness: Correctness | None = None
    timeline: list[Interval] = []
    slowest: list[RequestRecord] = []
    shards: list[Shard] = []
    events: list[Event] = []
    series: list[Series] = []
    environment: dict[str, Any] = {}
    """Of the machine that sent the load."""
    cut_short: CutShort | None = None
    settings: dict[str, Any] = {}
    requests_file: str | None = None


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rate that a search tried. ``verdict``: ``met`` and ``missed`` are sure by the confidence, ``unsure`` is not;
    ``saturated`` was stopped because the backlog grew; ``invalid`` says nothing of the server."""

    rate: float
    verdict: Literal["met", "missed", "unsure", "saturated", "invalid", "cut short"]
    why: str
    run: Run


class Search(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="search", tag_field="kind"):
    """The highest rate that keeps all objectives. ``rate``: the highest that was met, None if none was; it lies between
    ``low`` and ``high`` (the lowest that was missed or saturated), both None where no such rate was tried."""

    form: int = FORM
    version: str
    label: str = ""
    target: Target
    began_at: float
    confidence: float
    objectives: list[Objective]
    rate: float | None
    low: float | None
    high: float | None
    goodput: float | None
    """At ``rate``, a second."""
    probes: list[Probe]
    cut_short: CutShort | None = None
    settings: dict[str, Any] = {}


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One load of a sweep. ``pareto``: no other valid point has both more output tokens a second and a lower median
    e2e. ``load`` is a rate, or a number of clients in a closed loop."""

    load: float
    pareto: bool
    saturated: bool
    run: Run


class Sweep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sweep", tag_field="kind"):
    """Throughput and latency over the load."""

    form: int = FORM
    version: str
    label: str = ""
    target: Target
    began_at: float
    by: Literal["rate", "concurrency"]
    points: list[Point]
    cut_short: CutShort | None = None
    settings: dict[str, Any] = {}


Results = Run | Search | Sweep
_decoder: msgspec.json.Decoder[Results] = msgspec.json.Decoder(Results)


def write(path: Path, results: Results) -> None:
    """Writes ``results`` to ``path``, whose folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read(path: Path) -> Results:
    """Returns what ``path`` has.

    Raises:
        ResultsUnreadable: there is no such file, or it is not of this form.
    """
    try:
        found = _decoder.decode(path.read_bytes())
    except OSError as error:
        raise ResultsUnreadable(f"Cannot read {path}: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise ResultsUnreadable(
            f"{path} is no results file: {error}.", hint="`expertmesh-load run URL --out FILE` writes one."
        ) from error
    if found.form > FORM:
        raise ResultsUnreadable(
            f"{path} has form {found.form}, and this release reads up to {FORM}.", hint="Use the release that wrote it."
        )
    return found


def read_run(path: Path) -> Run:
    """Returns the run that ``path`` has.

    Raises:
        ResultsUnreadable: it has none.
    """
    found = read(path)
    if not isinstance(found, Run):
        raise ResultsUnreadable(f"{path} is a {type(found).__name__.lower()}, not a run.")
    return found
