"""`expertmesh plan --trace`: files that are not as they must be, and what a replay holds to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.main import main
from services.errors import ConfigError
from services.planner.day.compare import compare
from services.planner.day.fleet import Fleet
from services.planner.day.flow import Demand, flow
from services.planner.day.replay import ATTENTION, Plant, replay
from services.planner.day.routing import even_shares, read_shares
from services.planner.day.server import Targets
from services.planner.day.sizing import peak_of, sized
from services.planner.day.times import ServiceTimes, read_times
from services.planner.day.trace import Minute, Trace, read_trace
from services.scheduler.scaling import Bounds, ScalingOptions, Target

HEAD = "minute,requests_per_s,prompt_tokens_mean,output_tokens_mean"
SHIPPED = Path(__file__).resolve().parents[3] / "loadgen/day"
MANY, ONE = Bounds(minimum=1, maximum=32), Bounds(minimum=1, maximum=1)
OPTIONS = ScalingOptions(bounds={"experts": MANY, "attention": MANY, "gateway": ONE})
PLANT = Plant(
    times=ServiceTimes(),
    targets=Targets(ttft_s=2.0, tpot_s=0.05),
    places=16,
    shares=even_shares(1, 2),
    start_s=30.0,
    drain_s=10.0,
    attention_gpus=1.0,
    shard_gpus=1.0,
)


def trace_of(rates: list[float], topics: Mapping[str, float] | None = None) -> Trace:
    names = topics or {}
    minutes = [
        Minute(number=at, requests_per_s=rate, prompt_tokens=100, output_tokens=60, topics=tuple(names.values()))
        for at, rate in enumerate(rates)
    ]
    return Trace(topics=tuple(names), minutes=tuple(minutes))


def start(plant: Plant = PLANT, many: int = 1) -> dict[Target, int]:
    return dict.fromkeys((ATTENTION, *plant.shards), many)


def written(folder: Path, text: str) -> Path:
    file = folder / "trace.csv"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no column minute, requests_per_s"),
        (HEAD + "\n", "has no rows"),
        ("minute,requests_per_s,prompt_tokens_mean\n0,1,1\n", "no column output_tokens_mean"),
        (HEAD + ",verse,verse\n0,1,1,1,1,0\n", "'verse' twice"),
        (HEAD + ",\n0,1,1,1,1\n", "column without a name"),
        (HEAD + "\n0,1,many,1\n", "line 2: prompt_tokens_mean is 'many'"),
        (HEAD + "\n0,1,1,1\n1,-2,1,1\n", "line 3: requests_per_s is '-2'; expected a number of 0 or more"),
        (HEAD + "\n0,nan,1,1\n", "requests_per_s is 'nan'"),
        (HEAD + "\n0,inf,1,1\n", "requests_per_s is 'inf'"),
        (HEAD + "\n0,1,1\n", "line 2: 3 values for 4 columns"),
        (HEAD + "\n0.5,1,1,1\n", "minute is 0.5; expected a whole number"),
        (HEAD + "\n0,1,1,1\n2,1,1,1\n", "line 3: minute 2 comes after minute 0"),
        (HEAD + "\n1,1,1,1\n0,1,1,1\n", "line 3: minute 0 comes after minute 1"),
        (HEAD + "\n0,1,0,1\n", "prompt_tokens_mean is 0; expected at least 1"),
        (HEAD + ",verse,prose\n0,1,1,1,0.5,0.2\n", "add up to 0.7, not 1"),
    ],
)
def test_a_trace_that_is_not_as_it_must_be_says_where(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_trace(written(tmp_path, text))


def test_a_trace_may_have_a_mark_blank_lines_and_silence(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes(b"\xef\xbb\xbf" + f"{HEAD}, verse\r\n7,0,0,0,0\r\n\r\n8,2.5,10,20,1\r\n".encode())
    trace = read_trace(file)
    assert (trace.topics, [minute.number for minute in trace.minutes]) == (("verse",), [7, 8])
    assert trace.minutes[0].topics == (1.0,)


@pytest.mark.parametrize("name", ["absent.csv", "."])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith("expertmesh: Cannot read the trace")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "not usable"),
        ('{"attention_stop": 1}', "attention_stop"),
        ('{"attention_step": "1"}', "not usable"),
        ('{"attention_step": -1}', "attention_step is negative"),
        ('{"attention_step": 0, "attention_row": 0, "experts_step": 0, "experts_row": 0}', "takes no time"),
    ],
)
def test_service_times_that_cannot_be_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "times.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_times(tmp_path / "times.json")


def test_shards_that_do_not_divide_the_experts_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"16 experts of a layer cannot be split evenly over 3 .* 1, 2, 4, 8, 16"):
        read_shares(SHIPPED / "pocket-routing.json", ["verse"], 3)
    with pytest.raises(ConfigError, match="lacks the topics poems"):
        read_shares(SHIPPED / "pocket-routing.json", ["verse", "poems"], 2)


def test_rows_of_a_topic_go_to_the_shards_whose_experts_it_chose(tmp_path: Path) -> None:
    counts = {"one": [[3, 1, 0, 0], [1, 1, 1, 1]], "two": [[0, 0, 0, 2], [0, 0, 5, 5]]}
    (tmp_path / "routing.json").write_text(json.dumps({"counts": counts}))
    assert read_shares(tmp_path / "routing.json", ["two", "one"], 2) == [[0.0, 1.0], [0.75, 0.25]]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--shards", "0"], "--shards is 0"),
        (["--target-ttft", "0"], "--target-ttft is 0; expected more than 0"),
        (["--gpu-hour-cost", "-1"], "--gpu-hour-cost is -1"),
        (["--start-seconds", "nan"], "--start-seconds is nan"),
        (["--min-replicas", "5", "--max-replicas", "4"], "--min-replicas 5 is more than --max-replicas 4"),
        (["--gpus", "4"], "--gpus"),
    ],
)
def test_options_that_cannot_be_are_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", str(SHIPPED / "bursty-day.csv"), *words]) == 2
    assert problem in capsys.readouterr().err


def test_what_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "\n".join(f"{at},{5 if at < 5 else 60},80,60,0.5,0.5" for at in range(10))
    file, out = written(tmp_path, f"{HEAD},verse,prose\n{rows}\n"), tmp_path / "figures.json"
    words = ["plan", "--trace", str(file), "--routing", str(SHIPPED / "pocket-routing.json"), "--json", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "GPU-hours" in printed
    assert "than whole engines" in printed
    figures = json.loads(out.read_text())
    shards = figures["ways"]["shard groups"]
    assert len(shards["replicas"]["experts/0"]) >= 10
    assert shards["ended"] == pytest.approx(5 * 300 + 5 * 3600, rel=0.1)
    hours = sum(map(sum, shards["replicas"].values())) / 60
    assert shards["gpu_hours"] == pytest.approx(hours, rel=0.1)


def test_a_fleet_bills_from_the_wish_to_the_end_of_draining() -> None:
    fleet = Fleet(start_s=30, drain_s=10, ready=1)
    fleet.want(3, 0)
    fleet.want(3, 5)
    assert (fleet.ready, fleet.billed) == (1, 3)
    fleet.advance(30)
    assert fleet.ready == 3
    fleet.want(4, 31)
    fleet.want(2, 32)
    assert (fleet.ready, fleet.computing, fleet.billed) == (2, 3, 3), "what has not started goes first"
    fleet.advance(42)
    assert fleet.billed == 2


def test_calls_wait_for_each_other_only_where_there_are_fewer_seats_than_callers() -> None:
    demand = Demand(batch=64.0, prefill=0.0, shares=(0.5, 0.5))
    alone = flow(ServiceTimes(), 4, (4, 4), demand, 0.0)
    crowded = flow(ServiceTimes(), 4, (1, 4), demand, 0.0)
    assert alone is not None
    assert crowded is not None
    assert alone.waiting == (0.0, 0.0)
    assert crowded.waiting[0] > 0.1
    assert crowded.step_s > alone.step_s
    assert crowded.stall[0] > 2 * crowded.stall[1]
    assert flow(ServiceTimes(), 4, (1, 0), demand, 0.0) is None


@given(st.integers(1, 12), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.floats(0, 800), st.floats(0, 50_000))
@settings(max_examples=200, deadline=None)
def test_no_seat_is_busier_than_all_the_time_and_waits_add_up(
    attention: int, seats: list[int], batch: float, prefill: float
) -> None:
    demand = Demand(batch=batch, prefill=prefill, shares=[1 / len(seats)] * len(seats))
    now = flow(ServiceTimes(), attention, seats, demand, 0.0)
    assert now is not None
    assert all(0 <= busy <= many for busy, many in zip(now.busy, seats, strict=True))
    assert 0 <= sum(now.stall) <= 1
    assert math.isfinite(now.step_s)
    assert now.step_s > 0


def test_every_request_ends_once_and_a_steady_load_is_met_without_moves() -> None:
    begin = sized(PLANT, OPTIONS, trace_of([8.0]).minutes[0], 1.0)
    steady = replay(trace_of([8.0] * 30), PLANT, OPTIONS, begin, way="shards")
    assert steady.tally.ended == pytest.approx(8 * 1800, rel=0.05)
    assert steady.attainment > 0.999
    assert steady.changes <= 2


def test_a_step_of_the_load_is_followed_up_at_once_and_down_once_without_swinging() -> None:
    """The closed loop with replicas that take half a minute to start: up, there, and down again, each once."""
    outcome = replay(trace_of([4.0] * 10 + [60.0] * 20 + [4.0] * 20), PLANT, OPTIONS, start(), way="shards")
    attention = [row[ATTENTION] for row in outcome.by_minute]
    high = sized(PLANT, OPTIONS, trace_of([60.0]).minutes[0], 1.0)[ATTENTION]
    assert max(attention[:10]) <= 2
    assert all(high <= many <= 2 * high for many in attention[16:30])
    assert max(attention[-10:]) <= 2
    assert sum(later < earlier for earlier, later in pairwise(attention)) <= 5


def test_it_sleeps_through_silence_and_no_request_is_lost() -> None:
    options = ScalingOptions(bounds=OPTIONS.bounds, sleep_after_s=120.0)
    outcome = replay(trace_of([4.0] * 5 + [0.0] * 20 + [4.0] * 5), PLANT, options, start(), way="shards")
    assert outcome.by_minute[15] == start(many=0)
    assert outcome.by_minute[26][ATTENTION] >= 1
    assert outcome.tally.given_up == 0
    assert outcome.tally.ended == pytest.approx(4 * 600, rel=0.1)


def test_only_the_shard_whose_topic_is_asked_for_grows() -> None:
    plant = replace(PLANT, shares=[[0.95, 0.05]], times=ServiceTimes(experts_step=0.0002))
    outcome = replay(trace_of([200.0] * 15), plant, OPTIONS, start(), way="shards")
    assert outcome.peak[Target("experts", 0)] >= 3 * outcome.peak[Target("experts", 1)]


def test_equal_is_the_smallest_fixed_server_that_is_as_good() -> None:
    trace = trace_of([4.0] * 60 + [30.0] * 10 + [4.0] * 60)
    found = compare(trace, PLANT, OPTIONS, scale=1.0, seed=0)
    assert found.equal is not None
    assert found.equal.attainment >= found.shards.attainment
    assert found.shards.gpu_hours < found.equal.gpu_hours
    assert found.shards.gpu_hours < found.engines.gpu_hours
    assert peak_of(trace).number == 60


def test_the_same_seed_gives_the_same_day() -> None:
    days = [replay(trace_of([5.0] * 5), PLANT, OPTIONS, start(), way="shards", seed=3) for _ in range(2)]
    assert days[0].tally == days[1].tally
    assert days[0].tally != replay(trace_of([5.0] * 5), PLANT, OPTIONS, start(), way="shards", seed=4).tally
