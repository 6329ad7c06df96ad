"""What `expertmesh top` makes of readings, and how it fits them into a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from services.errors import ConfigError
from services.messages import ExpertInfo, SeatReport, WorkerInfo
from services.metrics import ExpertMetrics
from services.queue.scheduler_side import QueueDepth, WorkerState
from services.queue.seats import SeatState
from services.routing import RoutingTable, even_groups
from services.top.__main__ import main
from services.top.frame import frame
from services.top.readings import Reading, _url, sums
from services.top.view import view


def seat(number: int, group: int, status: str = "ready") -> SeatState:
    info = ExpertInfo(
        id=f"experts-{number}", fingerprint="f", host="10.0.0.1", port=7100, memory_bytes=1, pid=1, version="0"
    )
    report = SeatReport(status=status, group=group, outstanding_rows=5)  # type: ignore[arg-type]
    rest = {"report": report, "dismissed": False, "assigned": None}
    return SeatState(number=number, info=info, status=status, **rest)  # type: ignore[arg-type]


def worker(name: str) -> WorkerState:
    info = WorkerInfo(
        id=name, model="m", fingerprint="f", kv_tokens=1, max_num_seqs=1, max_model_len=1, host="h", pid=1, version="0"
    )
    return WorkerState(info=info, outstanding_tokens=1, outstanding_requests=3, credit_tokens=1, credit_requests=1)


SEATS = (seat(11, 0), seat(12, 1), seat(13, 1))
TABLE = RoutingTable(
    epoch=7,
    fingerprint="f",
    num_experts=8,
    groups=even_groups([0], 8, 2),
    seats=tuple(state.seat(state.report.group or 0) for state in SEATS),
)


def rows(*totals: float) -> dict[str, dict[str, float]]:
    return {
        state.info.id: {"experts_rows_total": total, "experts_busy_seconds_total": total / 1000}
        for state, total in zip(SEATS, totals, strict=True)
    }


BEFORE = Reading(
    at_s=10.0,
    redis_at_s=10.0,
    depth=QueueDepth(requests=4, tokens=400, dead_letters=1),
    table=TABLE,
    seats=SEATS,
    workers=(worker("attention-a"),),
    pages={**rows(0, 0, 0), "attention-a": {"requests_running": 2, "requests_waiting": 1, "decode_tokens_total": 50}},
)
NOW = replace(
    BEFORE,
    at_s=12.0,
    redis_at_s=12.0,
    pages={**rows(600, 200, 400), "attention-a": {**BEFORE.pages["attention-a"], "decode_tokens_total": 90}},
)


def drawn(reading: Reading, width: int = 120, height: int | None = None, before: Reading | None = BEFORE) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(view(frame(before, reading), width, height))
    return out.getvalue().splitlines()


def test_rates_shares_and_imbalance() -> None:
    seen = frame(BEFORE, NOW)
    assert [line.rows_per_s for line in seen.seats] == [300, 100, 200]
    assert [line.busy for line in seen.seats] == pytest.approx([0.3, 0.1, 0.2])
    assert seen.imbalance == pytest.approx(1.5)
    groups = [(group.group, group.seats, group.rows_per_s, group.share) for group in seen.groups]
    assert groups == [(0, 1, 300, 0.5), (1, 2, 300, 0.5)]
    assert (seen.tokens_per_s, seen.in_flight, seen.epoch) == (20, 15, 7)
    assert [(line.running, line.waiting, line.assigned) for line in seen.workers] == [(2, 1, 3)]


def test_a_counter_that_restarted_gives_no_negative_rate() -> None:
    assert frame(NOW, replace(NOW, at_s=14.0, pages=rows(10, 10, 10))).seats[0].rows_per_s == 0


def test_one_reading_gives_levels_and_no_rates() -> None:
    seen = frame(None, NOW)
    assert (seen.tokens_per_s, seen.imbalance, seen.queued) == (None, None, 4)


def test_states_that_need_a_look_are_named() -> None:
    loading, unlisted = seat(12, 1, "loading"), seat(14, 1)
    reading = replace(NOW, seats=(SEATS[0], loading, unlisted), pages={"experts-11": {}, "experts-14": {}})
    seen = {line.seat: line.status for line in frame(BEFORE, reading).seats}
    assert seen == {11: "ready", 12: "loading, no metrics", 14: "ready, not in table", 13: "gone"}
    assert frame(BEFORE, reading).workers[0].status == "no metrics"


def test_what_redis_said_stays_while_it_is_away() -> None:
    lines = drawn(replace(NOW, at_s=15.0, problem="Redis does not answer."))
    assert "REDIS IS AWAY (below is what it said 3 s ago): Redis does not answer." in lines[0]
    assert any("attention-a" in line for line in lines)
    assert drawn(Reading(at_s=1.0, problem="Refused."), before=None) == ["REDIS IS AWAY: Refused."]


@pytest.mark.parametrize("width", [1, 8, 20, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(NOW, width)
    assert max(map(len, lines)) <= width
    if width >= 20:
        assert any(line.split()[:1] == ["12"] for line in lines)
    assert any("address" in line for line in lines) == (width >= 120)


@pytest.mark.parametrize("height", [15, 24, 50])
def test_nothing_is_higher_than_the_terminal(height: int) -> None:
    many = replace(NOW, seats=tuple(seat(number, 0) for number in range(100, 180)))
    lines = drawn(many, 100, height)
    assert len(lines) <= height
    assert any("more" in line for line in lines)


def test_a_page_is_summed_over_its_labels() -> None:
    registry = CollectorRegistry()
    metrics = ExpertMetrics(registry)
    metrics.rows.labels(0, "1").inc(3)
    metrics.rows.labels(1, "1").inc(4)
    assert sums(generate_latest(registry).decode())["experts_rows_total"] == 7
    with pytest.raises(ValueError, match="html"):
        sums("<html>not a page</html>")


def test_a_worker_that_listens_everywhere_is_asked_at_its_host() -> None:
    assert _url("http://0.0.0.0:9100/metrics", "gpu-7") == "http://gpu-7:9100/metrics"
    assert _url("http://10.1.2.3:9100/metrics", "gpu-7") == "http://10.1.2.3:9100/metrics"
    assert _url(None, "gpu-7") is None


@pytest.mark.parametrize("argv", [["--interval", "0"], [], ["--interval", "soon"]])
@pytest.mark.usefixtures("temporary")
def test_wrong_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(argv)
