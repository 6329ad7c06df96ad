"""Figures in words, as every kind of report has them."""

from __future__ import annotations

from datetime import UTC, datetime

from loadgen.results import Metric
from services.dashboards.units import text

METRICS: dict[Metric, str] = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "end to end",
    "service_ttft": "TTFT from sending",
    "service": "end to end from sending",
    "lag": "send lag",
}
"""Names of latencies, in the order in which reports have them."""
MEANINGS: dict[Metric, str] = {
    "ttft": "to the first token, from the scheduled time",
    "itl": "between two chunks of an answer",
    "tpot": "after the first token, over the other tokens",
    "e2e": "to the end, from the scheduled time",
    "service_ttft": "to the first token, from when the request was sent",
    "service": "to the end, from when the request was sent",
    "lag": "sent after the scheduled time",
}


def ms(value: float | None) -> str:
    """Returns milliseconds with their unit, of which the largest is a second.

    >>> ms(0.25), ms(1234.5), ms(100000.0), ms(None)
    ('250 µs', '1.23 s', '100 s', '–')
    """
    if value is None:
        return "–"
    return f"{value / 1e3:,.0f} s" if value >= 60_000 else text(value, "ms")


def amount(value: float | None) -> str:
    """Returns a number with three digits, or all of those before the point.

    >>> amount(0.12345), amount(1234567.8), amount(None)
    ('0.123', '1,234,568', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def count(value: int, one: str, many: str | None = None) -> str:
    """Returns a number with its noun.

    >>> count(1, "request"), count(1200, "answer"), count(0, "reply", "replies")
    ('1 request', '1,200 answers', '0 replies')
    """
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def share(part: float, whole: float) -> str:
    """Returns a part in percent.

    >>> share(1, 8), share(0, 0)
    ('12.5 %', '0 %')
    """
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def seconds(value: float) -> str:
    """Returns a duration.

    >>> seconds(90.0), seconds(0.5)
    ('1.5 min', '500 ms')
    """
    return text(value, "s")


def moment(unix_s: float) -> str:
    """Returns a time of the day in UTC.

    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def percentile(value: float) -> str:
    """Returns a percentile's name.

    >>> percentile(50.0), percentile(99.9)
    ('p50', 'p99.9')
    """
    return f"p{value:g}"
