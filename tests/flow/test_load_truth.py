"""The load generator is right: beside a null server in a process of its own, whose delays and stalls are known,
its percentiles are those that follow from the schedule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.histograms import exact
from loadgen.results import Run, read_run

DELAY_S, STALL_AT_S, STALL_S = 0.1, 3.0, 1.0
RATE, SECONDS = 100, 10.0
TRIES = 4
LOAD = (sys.executable, "-m", "expertmesh.load")
LATE_MS, LATEST_MS = 1.0, 10.0
"""The null server's own lateness (median, maximum), above which its delays are not what they should be."""

pytestmark = [pytest.mark.alone]


def realtime() -> bool:
    """Whether processes may go before all others here."""
    try:
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, *before)
    except OSError:
        return False
    return True


@contextmanager
def null(*words: str) -> Iterator[str]:
    command = [*LOAD, "null", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if realtime():
            os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(2))
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.terminate()


def load(url: str, *words: str) -> int:
    before = ["--realtime"] if realtime() else []
    command = [*LOAD, "run", url, "--quiet", *before, *words]
    return subprocess.run(command, timeout=120, check=False).returncode


def truth(scheduled: float) -> float:
    """What a request that is due then waits for its first token: it is taken in after the stall, if it comes within,
    and what would be written within comes at its end."""
    end = STALL_AT_S + STALL_S
    taken = end if STALL_AT_S <= scheduled < end else scheduled
    written = taken + DELAY_S
    return (end if STALL_AT_S <= written < end else written) - scheduled


def measured(tmp_path: Path) -> tuple[Run, list[dict[str, Any]]]:
    """A run during which this machine let both sides be on time."""
    why = []
    for _ in range(TRIES):
        start = time.time() + 4
        words = ["--first-token", str(DELAY_S), "--stall", f"{STALL_AT_S}:{STALL_S}", "--epoch", str(start)]
        with null(*words) as url:
            out, requests = tmp_path / "run.json", tmp_path / "requests.jsonl"
            schedule = ["--rate", str(RATE), "--gaps", "constant", "--duration", str(SECONDS), "--start-at", str(start)]
            outputs = ["--output-tokens", "1", "--out", str(out), "--requests-file", str(requests)]
            code = load(url, *schedule, *outputs)
            late = httpx.get(f"{url}/stats").json()
        run = read_run(out)
        assert code == (0 if run.validity.valid else 3)
        if run.validity.valid and late["late_p50_ms"] <= LATE_MS and late["late_max_ms"] <= LATEST_MS:
            return run, [json.loads(line) for line in requests.read_text().splitlines()]
        why += [*run.validity.reasons, f"the null server was late: {late}"]
    pytest.skip(f"this machine is too busy to measure on: {why}")


def test_percentiles_are_within_two_percent_of_the_truth_and_a_stall_is_there_in_full(tmp_path: Path) -> None:
    run, requests = measured(tmp_path)
    assert len(requests) == run.counts.ok == RATE * SECONDS
    wanted = sorted(truth(each.get("scheduled_s", 0.0)) for each in requests)
    ttft = run.latency["ttft"]
    for percentile, found in ((50, ttft.p50_ms), (99, ttft.p99_ms), (99.9, ttft.p99_9_ms)):
        assert found == pytest.approx(exact(wanted, percentile) * 1e3, rel=0.02), percentile
    assert ttft.p99_9_ms > 1000
    stalled = [each for each in requests if STALL_AT_S <= each["scheduled_s"] < STALL_AT_S + STALL_S]
    assert len(stalled) == pytest.approx(RATE * STALL_S, abs=1)
    for each in stalled:
        waited = each["first_token_s"] - each["scheduled_s"]
        assert waited == pytest.approx(truth(each["scheduled_s"]), abs=0.02)
    second = next(interval for interval in run.timeline if interval.at_s == STALL_AT_S)
    assert second.ok == 0
    assert second.backlog == pytest.approx(RATE * (STALL_S + DELAY_S), abs=2)


def test_several_processes_share_one_schedule_without_drift(tmp_path: Path) -> None:
    """Parts of one schedule: every request once, at its time, whoever sends it."""
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    with null("--first-token", "0.02") as url:
        schedule = ["--rate", "100", "--duration", "3", "--output-tokens", "1", "--lag-limit", "1000ms"]
        assert load(url, *schedule, "--requests-file", str(one)) == 0
        assert load(url, *schedule, "--processes", "3", "--requests-file", str(many)) == 0
        start = str(time.time() + 6)
        parts = [tmp_path / f"{index}.json" for index in range(2)]
        shards = [
            subprocess.Popen(
                [*LOAD, "run", url, "--quiet", *schedule, f"--shard={index}/2", f"--start-at={start}", f"--out={part}"]
            )
            for index, part in enumerate(parts)
        ]
        assert [shard.wait(60) for shard in shards] == [0, 0]
    times = [
        {each["number"]: each.get("scheduled_s", 0.0) for each in map(json.loads, file.read_text().splitlines())}
        for file in (one, many)
    ]
    assert times[0] == times[1]
    assert len(times[0]) > 200
    merged = tmp_path / "merged.json"
    command = [*LOAD, "merge", *map(str, parts), "--out", str(merged)]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0
    whole = read_run(merged)
    assert whole.counts.ok == len(times[0]) == sum(shard.requests for shard in whole.shards)
    assert whole.began_at == pytest.approx(float(start))
