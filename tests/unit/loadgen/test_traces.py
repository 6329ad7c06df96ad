"""Replays of recorded loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.errors import FileUnusable
from loadgen.schedule.traces import Cut, read_replay
from loadgen.workload.synthetic import Replayed
from loadgen.workload.words import Prompts

DAY = Path(__file__).resolve().parents[3] / "loadgen/day/bursty-day.csv"
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 9000, "input_length": 512, "output_length": 5, "hash_ids": [7]},
]
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in MOONCAKE))
    return path


def test_mooncakes_requests_come_at_their_times_with_their_blocks(mooncake: Path) -> None:
    found = read_replay(mooncake, Cut(speed=2.0), seed=0)
    assert list(found.schedule.times) == [0.0, 1.0, 4.0]
    assert [(each.prompt_tokens, each.output_tokens) for each in found.requests] == [(1100, 20), (600, 10), (512, 5)]
    source = Replayed(prompts=Prompts(ids=True), requests=found.requests, seed=0)
    first, second, third = (source.conversation(number).turns[0].content for number in range(3))
    assert [len(each) for each in (first, second, third)] == [1100, 600, 512]
    assert first[:600] == second
    assert first[:512] != third


def test_a_part_of_a_trace_begins_at_its_begin(mooncake: Path) -> None:
    found = read_replay(mooncake, Cut(begin=1.5, end=9.0), seed=0)
    assert list(found.schedule.times) == [0.5, 6.5]
    with pytest.raises(FileUnusable, match="Nothing of"):
        read_replay(mooncake, Cut(begin=50.0), seed=0)


def test_burst_gpts_failed_requests_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT.csv"
    path.write_text(BURST_GPT)
    found = read_replay(path, Cut(), seed=0)
    assert list(found.schedule.times) == [0.0, 113.0]
    assert [(each.prompt_tokens, each.output_tokens) for each in found.requests] == [(472, 18), (417, 276)]


def test_a_day_has_its_rates_lengths_and_topics() -> None:
    """Minutes 600 to 660, sixty times as fast: about 60 a second of the day in each second, in a minute."""
    found = read_replay(DAY, Cut(begin=36_000, end=39_600, speed=60.0, scale=0.05), seed=4)
    rows = [line.split(",") for line in DAY.read_text().splitlines()[1:]][600:660]
    wanted = sum(60 * 0.05 * float(row[1]) for row in rows)
    assert len(found.schedule.times) == pytest.approx(wanted, abs=5 * wanted**0.5)
    assert found.schedule.seconds == pytest.approx(60.0)
    for column, values in (
        (2, [r.prompt_tokens for r in found.requests]),
        (3, [r.output_tokens for r in found.requests]),
    ):
        mean = sum(float(row[1]) * float(row[column]) for row in rows) / sum(float(row[1]) for row in rows)
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)
    share = sum(each.topic == "documentation" for each in found.requests) / len(found.requests)
    assert share == pytest.approx(sum(float(row[5]) for row in rows) / 60, abs=0.03)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "Timestamp,Request tokens\nx,1\n"])
def test_what_is_no_trace_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(FileUnusable, match="file"):
        read_replay(path, Cut(), seed=0)
    with pytest.raises(FileUnusable, match="Cannot read"):
        read_replay(tmp_path / "none", Cut(), seed=0)
