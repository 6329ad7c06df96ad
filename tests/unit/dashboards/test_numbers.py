"""Numbers with their units, ticks of axes, steps and times."""

from __future__ import annotations

import time

import pytest

from services.dashboards.axes import Scale, scale, ticks, time_ticks
from services.dashboards.times import Range, between, clock, duration, moment, nice_step, seconds, step_for
from services.dashboards.units import text
from services.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0, "s", "0 s"),
        (0.000123, "s", "123 µs"),
        (0.9996, "s", "1 s"),
        (75, "s", "1.25 min"),
        (1500, "ms", "1.5 s"),
        (2, "h", "2 h"),
        (-3, "s", "-3 s"),
        (1234.5, "short", "1.23 K"),
        (999.9, "short", "1 K"),
        (999_999, "short", "1 Mil"),
        (0.0004, "short", "0.0004"),
        (123_456, "none", "123456"),
        (0.1 + 0.2, "", "0.3"),
        (1 / 3, "percentunit", "33.3%"),
        (50, "percent", "50%"),
        (1610612736, "bytes", "1.5 GiB"),
        (0, "bytes", "0 B"),
        (0.5, "bytes", "0.5 B"),
        (1536, "Bps", "1.54 kB/s"),
        (12_345, "reqps", "12.3 K req/s"),
        (3, "cps", "3 c/s"),
        (45_000, "suffix:tokens/s", "45 K tokens/s"),
        (3.5, "prefix:$", "$ 3.5"),
        (1, "bool_yes_no", "Yes"),
        (1_234_567, "locale", "1,234,567"),
        (float("inf"), "s", "∞"),
        (7, "tokens", "7 tokens"),
    ],
)
def test_a_number_has_its_unit(value: float, unit: str, shown: str) -> None:
    assert text(value, unit) == shown


def test_decimals_are_kept_where_they_are_set() -> None:
    assert text(1, "s", 2) == "1.00 s"
    assert text(0.5, "percentunit", 1) == "50.0%"


@pytest.mark.parametrize(
    ("values", "bounds", "low", "high"),
    [
        ([0, 100], {}, 0, 105),
        ([50, 100], {}, 0, 102.5),
        ([1000, 1001], {}, 999.95, 1001.05),
        ([1000, 1001], {"from_zero": True}, 0, 1001.05),
        ([0, 0], {}, 0, 1),
        ([], {}, 0, 1),
        ([-5, 5], {}, -5.5, 5.5),
        ([3, 4], {"low": 0, "high": 1}, 0, 1),
        ([0.003, 0.2], {"log": 10}, 0.001, 1),
        ([0, 5], {"log": 10}, 1, 10),
    ],
)
def test_a_scale_holds_the_values(values: list[float], bounds: dict[str, float], low: float, high: float) -> None:
    found = scale(values, **bounds)  # type: ignore[arg-type]
    assert (found.low, found.high) == pytest.approx((low, high))


def test_places_are_shares_of_the_axis() -> None:
    assert [Scale(low=0, high=4).share(value) for value in (0, 1, 4, 9, -1)] == [0, 0.25, 1, 1, 0]
    assert Scale(low=0.01, high=1, log=10).share(0.1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("found", "unit", "labels"),
    [
        (Scale(low=0, high=0.96), "s", ["0 s", "200 ms", "400 ms", "600 ms", "800 ms"]),
        (Scale(low=0, high=100), "", ["0", "20", "40", "60", "80", "100"]),
        (Scale(low=0, high=4 << 30), "bytes", ["0 B", "1 GiB", "2 GiB", "3 GiB", "4 GiB"]),
        (Scale(low=0, high=84), "s", ["0 s", "20 s", "40 s", "60 s", "80 s"]),
        (Scale(low=0, high=600), "s", ["0 s", "5 min", "10 min"]),
        (Scale(low=0.001, high=10, log=10), "s", ["1 ms", "10 ms", "100 ms", "1 s", "10 s"]),
        (
            Scale(low=999.95, high=1001.05),
            "short",
            ["1.0000 K", "1.0002 K", "1.0004 K", "1.0006 K", "1.0008 K", "1.0010 K"],
        ),
    ],
)
def test_ticks_are_round_and_differ(found: Scale, unit: str, labels: list[str]) -> None:
    assert [tick.label for tick in ticks(found, unit, None, 4)] == labels


def test_ticks_lie_where_their_values_do() -> None:
    assert [tick.at for tick in ticks(Scale(low=0, high=50), "", None, 5)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


def test_times_are_round_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")  # half an hour beside the others
    time.tzset()
    try:
        start = 1_795_822_800 - 1_795_822_800 % 3600
        found = time_ticks(Range(start_s=start, end_s=start + 3600), 4)
        assert [tick.label[3:] for tick in found] == ["30", "45", "00", "15", "30"]
        assert [tick.at for tick in found] == [0, 0.25, 0.5, 0.75, 1]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert len(clock(start, 5)) == 8


def test_a_duration_is_read_and_written() -> None:
    assert seconds("1h30m") == 5400
    assert seconds("500ms") == 0.5
    assert (duration(90), duration(0.5)) == ("90s", "500ms")
    for wrong in ("", "5", "1x", "h", "1h x"):
        with pytest.raises(ConfigError, match="no duration"):
            seconds(wrong)


def test_a_moment_is_relative_or_a_date() -> None:
    assert [moment(text, 10_000.0) for text in ("now", "now-1h", "-1h", "77")] == [10_000, 6400, 6400, 77]
    assert moment("1970-01-01T00:01:00+00:00", 0.0) == 60
    with pytest.raises(ConfigError, match="is no time"):
        moment("yesterday", 0.0)
    with pytest.raises(ConfigError, match="no time between"):
        between("now", "-1h", 0.0)
    for start, end in (("nan", "now"), ("-99999999y", "now"), ("0", "1e300"), (f"-{'9' * 400}y", "now")):
        with pytest.raises(ConfigError, match="not within the years"):
            between(start, end, 10_000.0)


def test_a_step_is_nice_and_no_shorter_than_a_scrape() -> None:
    assert [nice_step(wanted) for wanted in (0.4, 2.1, 61, 86_401)] == [1, 5, 120, 172_800]
    assert step_for(3600, 144, 15) == 30
    assert step_for(60, 144, 15) == 15
    assert Range(start_s=12, end_s=29).aligned(10) == Range(start_s=10, end_s=20)
