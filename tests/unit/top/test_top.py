"""What `expertmesh top` makes of readings, and how it fits them into a terminal."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from testkit.waiting import LIMIT_S

from services.errors import ConfigError
from services.messages import ExpertInfo, GatewayLoad, LatencyCounts, SeatReport, WorkerInfo
from services.metrics import ExpertMetrics
from services.queue.scheduler_side import QueueDepth, WorkerState
from services.queue.seats import SeatState
from services.routing import RoutingTable, even_groups
from services.top.__main__ import Top, main
from services.top.frame import frame
from services.top.latency import quantile, quantiles
from services.top.readings import Reading, _url, sums
from services.top.view import view


def seat(number: int, group: int, status: str = "ready") -> SeatState:
    info = ExpertInfo(
        id=f"host-{number}", fingerprint="f", host="10.0.0.1", port=7100, memory_bytes=1, pid=1, version="0",
        process=f"experts-{number}",
    )  # fmt: skip
    report = SeatReport(status=status, group=group, outstanding_rows=5)  # type: ignore[arg-type]
    rest = {"report": report, "dismissed": False, "assigned": None}
    return SeatState(number=number, info=info, status=status, **rest)  # type: ignore[arg-type]


def worker(name: str) -> WorkerState:
    info = WorkerInfo(
        id=f"host-{name}", model="m", fingerprint="f", kv_tokens=4000, max_num_seqs=1, max_model_len=1, host="h", pid=1,
        version="0", process=name,
    )  # fmt: skip
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


BOUNDS = (0.05, 0.1, 0.2)


def gateway(*ttft: int, tpot: tuple[int, ...] = (0, 0, 0, 0)) -> GatewayLoad:
    """The counts are totals of what is at most each of the bounds, and of all."""
    counts = {"ttft": LatencyCounts(BOUNDS, ttft), "tpot": LatencyCounts(BOUNDS, tpot)}
    return GatewayLoad(up_s=1.0, cpu_s=1.0, came=0, ended=0, ttft=(), tpot=(), latencies=counts)


ATTENTION = {
    "requests_running": 2,
    "requests_waiting": 1,
    "decode_tokens_total": 50,
    "prefill_tokens_total": 100,
    "kv_cache_usage_ratio": 0.25,
}
BEFORE = Reading(
    at_s=10.0,
    redis_at_s=10.0,
    depth=QueueDepth(requests=4, tokens=400, dead_letters=1),
    table=TABLE,
    seats=SEATS,
    workers=(worker("attention-a"),),
    gateways={"g1": gateway(1, 1, 1, 1), "g2": gateway(0, 0, 5, 5)},
    pages={**rows(0, 0, 0), "host-attention-a": ATTENTION},
)
NOW = replace(
    BEFORE,
    at_s=12.0,
    redis_at_s=12.0,
    gateways={"g1": gateway(2, 3, 3, 3), "g2": gateway(0, 1, 6, 6), "g3": gateway(0, 0, 0, 9)},
    pages={
        **rows(600, 200, 400),
        "host-attention-a": {**ATTENTION, "decode_tokens_total": 90, "prefill_tokens_total": 400},
    },
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
    assert (seen.output_tokens_per_s, seen.prompt_tokens_per_s, seen.rows_in_flight, seen.epoch) == (20, 150, 15, 7)
    assert [(line.running, line.waiting, line.assigned) for line in seen.workers] == [(2, 1, 3)]


def test_latencies_are_those_between_the_readings_of_gateways_that_were_there_before() -> None:
    """Of g1 and g2 together 1 is at most 0.05, 3 are at most 0.1; of g3 nothing is known of the time before."""
    seen = frame(BEFORE, NOW)
    assert seen.ttft is not None
    assert (seen.ttft.p50_s, seen.ttft.p90_s) == pytest.approx((0.05 + 0.05 * 0.5 / 2, 0.05 + 0.05 * 1.7 / 2))
    assert (seen.tpot, seen.itl) == (None, None)


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((4, 4, 4, 4), 0.5, 0.025),
        ((1, 3, 3, 4), 0.5, 0.05 + 0.05 / 2),
        ((0, 0, 4, 4), 0.9, 0.1 + 0.1 * 0.9),
        ((0, 0, 0, 4), 0.5, 0.2),
        ((2, 2, 4, 4), 0.5, 0.05),
    ],
)
def test_a_quantile_is_what_prometheus_makes_of_the_buckets(counts: list[int], share: float, value: float) -> None:
    assert quantile(BOUNDS, counts, share) == pytest.approx(value)


def test_gateways_of_two_releases_may_count_in_other_buckets() -> None:
    other = GatewayLoad(
        up_s=1.0, cpu_s=1.0, came=0, ended=0, ttft=(), tpot=(), latencies={"ttft": LatencyCounts((1.0,), (7, 7))}
    )
    before = {"old": GatewayLoad(up_s=1.0, cpu_s=1.0, came=0, ended=0, ttft=(), tpot=()), "g1": gateway(0, 0, 0, 0)}
    now = {"old": other, "g1": gateway(3, 3, 3, 3)}
    found = quantiles(before, now, "ttft")
    assert found is not None
    assert (found.p50_s, found.p90_s) == pytest.approx((0.025, 0.045))
    assert quantiles({"old": other}, {"old": gateway(9, 9, 9, 9)}, "ttft") is None


def test_the_headline_speaks_of_tokens_and_what_clients_wait_for() -> None:
    lines = drawn(replace(NOW, seats=(), table=None))
    assert lines[:4] == [
        "output tokens/s 20   prompt tokens/s 150   KV tokens 1,000 of 4,000",
        "TTFT 62/93 ms   TPOT -   ITL -   (p50/p90)",
        "queue 4 requests, 400 tokens   running 2   dead letters 1",
        "",
    ]


def test_workers_have_the_names_of_logs_and_metrics() -> None:
    seen = frame(BEFORE, NOW)
    assert [line.name for line in seen.seats] == ["experts-11", "experts-12", "experts-13"]
    assert [(line.name, line.worker) for line in seen.workers] == [("attention-a", "host-attention-a")]
    nameless = replace(SEATS[0], info=msgspec.structs.replace(SEATS[0].info, process=""))
    assert frame(BEFORE, replace(NOW, seats=(nameless,))).seats[0].name == "host-11"
    elsewhere = replace(SEATS[1], info=msgspec.structs.replace(SEATS[0].info, host="10.0.0.2"))
    names = [line.name for line in frame(BEFORE, replace(NOW, seats=(SEATS[0], elsewhere))).seats]
    assert names[:2] == ["experts-11 10.0.0.1:7100", "experts-11 10.0.0.2:7100"], "each machine may have one"


def test_workers_keep_their_places_by_name() -> None:
    again = replace(NOW, seats=(seat(10, 0), seat(2, 0), *SEATS), table=None)
    assert [line.seat for line in frame(BEFORE, again).seats] == [2, 10, 11, 12, 13]


def test_memory_of_gpus_is_shown_where_there_are_some() -> None:
    assert "GPU" not in "\n".join(drawn(NOW, 200))
    memory = {"gpu_memory_bytes": 80 * 2**30, "gpu_memory_bytes/used": 61.25 * 2**30}
    pages = {**NOW.pages, "host-attention-a": {**ATTENTION, **memory}}
    pages["host-12"] = {**pages["host-12"], **{f"experts_{name}": value for name, value in memory.items()}}
    lines = drawn(replace(NOW, pages=pages), 80)
    assert sum("GPU GiB" in line for line in lines) == 2
    assert [line.split()[0] for line in lines if "61.2/80.0" in line] == ["attention-a", "experts-12"]


def test_large_numbers_of_tokens_fit_their_column() -> None:
    large = replace(NOW.workers[0], info=msgspec.structs.replace(NOW.workers[0].info, kv_tokens=12_345_678))
    assert any("3.09/12.35 M" in line for line in drawn(replace(NOW, workers=(large,))))


def test_a_counter_that_restarted_gives_no_negative_rate() -> None:
    assert frame(NOW, replace(NOW, at_s=14.0, pages=rows(10, 10, 10))).seats[0].rows_per_s == 0


def test_one_reading_gives_levels_and_no_rates() -> None:
    seen = frame(None, NOW)
    assert (seen.output_tokens_per_s, seen.ttft, seen.imbalance, seen.queued) == (None, None, None, 4)


def test_states_that_need_a_look_are_named() -> None:
    loading, unlisted = seat(12, 1, "loading"), seat(14, 1)
    reading = replace(NOW, seats=(SEATS[0], loading, unlisted), pages={"host-11": {}, "host-14": {}})
    seen = {line.seat: line.status for line in frame(BEFORE, reading).seats}
    assert seen == {11: "ready", 12: "loading, no answer", 14: "ready, not in table", 13: "gone"}
    assert frame(BEFORE, reading).workers[0].status == "no answer"


def test_a_dead_seat_is_not_ready_though_its_lease_lives() -> None:
    dead = replace(NOW, pages={name: page for name, page in NOW.pages.items() if name != "host-12"})
    assert [line.status for line in frame(BEFORE, dead).seats] == ["ready", "no answer", "ready"]


def test_what_redis_said_stays_while_it_is_away() -> None:
    lines = drawn(replace(NOW, at_s=15.0, problem="Redis does not answer."))
    assert "REDIS IS AWAY (below is what it said 3 s ago): Redis does not answer." in lines[0]
    assert any("attention-a" in line for line in lines)
    assert drawn(Reading(at_s=1.0, problem="Refused."), before=None) == ["REDIS IS AWAY: Refused."]
    assert drawn(replace(BEFORE, sleep=1), before=None)[0] == "ASLEEP at level 1; POST /wake_up wakes the model"


@pytest.mark.parametrize("width", [1, 8, 20, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(NOW, width)
    assert max(map(len, lines)) <= width
    if width >= 20:
        assert any(line.split()[:1] == ["experts-12"] for line in lines)
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
    metrics.gpu_memory.labels("used").set(30)
    metrics.gpu_memory.labels("free").set(50)
    page = sums(generate_latest(registry).decode())
    assert page["experts_rows_total"] == 7
    assert (page["experts_gpu_memory_bytes"], page["experts_gpu_memory_bytes/used"]) == (80, 30)
    with pytest.raises(ValueError, match="html"):
        sums("<html>not a page</html>")


def test_a_worker_that_listens_everywhere_is_asked_at_its_host() -> None:
    assert _url("http://0.0.0.0:9100/metrics", "gpu-7") == "http://gpu-7:9100/metrics"
    assert _url("http://10.1.2.3:9100/metrics", "gpu-7") == "http://10.1.2.3:9100/metrics"
    assert _url(None, "gpu-7") is None


async def test_a_frame_for_programs_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    readings = iter([BEFORE, NOW])

    async def read() -> Reading:
        return next(readings)

    reader: Any = SimpleNamespace(read=read)
    assert await Top(reader, Console(file=io.StringIO()), 0.0).once(asyncio.Event(), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["output_tokens_per_s"], found["kv_used_tokens"], found["interval_s"]) == (20, 1000, 2)
    assert found["ttft"] == {"p50_s": pytest.approx(0.0625), "p90_s": pytest.approx(0.0925)}
    assert (found["seats"][0]["name"], found["seats"][0]["rows_per_s"]) == ("experts-11", 300)


async def test_it_ends_at_once_while_nothing_answers() -> None:
    reader: Any = SimpleNamespace(read=asyncio.Event().wait)
    stop = asyncio.Event()
    running = asyncio.create_task(Top(reader, Console(file=io.StringIO()), 1.0).run(stop))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        assert await running == 0


@pytest.mark.parametrize("argv", [["--interval", "0"], [], ["--interval", "soon"], ["--url", "http://127.0.0.1:1"]])
@pytest.mark.usefixtures("temporary")
def test_wrong_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(argv)
