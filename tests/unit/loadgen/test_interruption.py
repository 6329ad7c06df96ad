"""A load that is asked to end early keeps what it has seen, and says that it was cut short."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.load.null import null, plan, stats
from testkit.load.simulated import facts

from loadgen.drive import part_of
from loadgen.errors import CUT_SHORT
from loadgen.interruption import Interruption, signals
from loadgen.null.behaviour import Behaviour
from loadgen.objectives import measured, parse_objective
from loadgen.plan import Closed
from loadgen.report.verdict import exit_code, verdict
from loadgen.results import Run, Search, Sweep, read, read_run
from loadgen.schedule.curve import flat
from loadgen.schedule.gaps import Gaps
from loadgen.schedule.schedule import arrivals
from loadgen.seen import Seen
from loadgen.summary import counts_of, run_of

SLOW = Behaviour(first_s=0.05, gap_s=30.0)
"""First tokens come, ends do not."""


@pytest.mark.parametrize("closed", [False, True])
async def test_what_is_under_way_is_seen_as_unfinished(closed: bool) -> None:
    stop = Interruption()
    async with null(SLOW) as url:
        load = Closed(10, 500, None) if closed else arrivals(flat(20.0), Gaps(0.0), seed=0, requests=500)
        with stop.heard():
            running = asyncio.ensure_future(part_of(replace(plan(url), load=load), stop=stop))
            while (await stats(url)).get("requests", 0) < 10:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            stop.ask("SIGTERM")
            part = await running
    counts = counts_of(part.seen)
    assert part.ending == "cut short"
    assert part.cut_at_s is not None
    assert counts.unfinished >= 9
    assert counts.scheduled == counts.ok + counts.unfinished
    assert counts.scheduled + (part.unsent or 0) == 500
    assert all(seen.ended <= part.cut_at_s for seen in part.seen)
    assert any(seen.first_token for seen in part.seen if seen.outcome == "unfinished")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as a program in the foreground has it; those in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_that_nobody_hears_and_a_second_one_end_the_program() -> None:
    with signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked is None
        heard: list[str] = []
        with stop.heard(lambda: heard.append("first")), stop.heard():
            signal.raise_signal(signal.SIGINT)
            assert (stop.asked, heard) == ("SIGINT", ["first"])
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def unfinished(waited_s: float, first_s: float | None = None) -> Seen:
    return Seen(number=0, scheduled=0.0, lag_s=0.0, sent=0.0, outcome="unfinished", first_token=first_s, ended=waited_s)


def test_who_waited_too_long_already_counts_as_late_and_nobody_else_does() -> None:
    ok = replace(unfinished(0.2, 0.1), outcome="ok")
    every = [ok, ok, unfinished(3.0), unfinished(0.3), unfinished(3.0, 0.2)]
    ttft = measured(parse_objective("ttft:p90<500ms"), every, 0.95).objective
    assert (ttft.met, ttft.share_within, ttft.value_ms) == (False, 3 / 4, None)
    e2e = measured(parse_objective("e2e:p90<500ms"), every, 0.95).objective
    assert e2e.share_within == 2 / 4
    assert measured(parse_objective("itl:p90<500ms"), every, 0.95).share is None
    run = run_of(facts(), every)
    assert (run.counts.unfinished, run.counts.failed, run.errors) == (3, 0, [])
    assert sum(each.failed for each in run.timeline) == 0


async def interrupted(url: str, out: Path, *words: str, after: int, how: signal.Signals = signal.SIGTERM) -> Any:
    """Returns what the command ``words`` wrote, and its exit code, when it is signalled after so many requests."""
    command = [sys.executable, "-m", "expertmesh.load", words[0], url, *words[1:], "--out", str(out)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    while (await stats(url)).get("requests", 0) < after:
        assert process.returncode is None
        await asyncio.sleep(0.05)
    process.send_signal(how)
    said, _ = await process.communicate()
    found = read(out)
    assert verdict(found).line in said.decode()
    assert process.returncode == exit_code(found) == CUT_SHORT
    return found


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_run_that_is_signalled_writes_its_results(tmp_path: Path, processes: str) -> None:
    async with null(Behaviour(first_s=0.05)) as url:
        words = ("run", "--rate", "20", "--duration", "500", "--processes", processes, "--lag-limit", "10000ms")
        run = await interrupted(url, tmp_path / "run.json", *words, after=40)
    assert isinstance(run, Run)
    assert run.cut_short is not None
    assert (run.cut_short.signal, run.validity.valid) == ("SIGTERM", True)
    assert run.counts.ok >= 30
    assert run.counts.scheduled + (run.cut_short.unsent or 0) == run.schedule.requests
    assert verdict(run).line.startswith("CUT SHORT: SIGTERM ended it after ")
    assert read_run(tmp_path / "run.json") == run


async def test_a_search_and_a_sweep_keep_the_probes_before(tmp_path: Path) -> None:
    async with null(Behaviour(first_s=0.05)) as url:
        words = ("search", "--slo", "ttft:p50<10s", "--probe-seconds", "1", "--start", "40", "--lag-limit", "10000ms")
        found = await interrupted(url, tmp_path / "search.json", *words, after=100, how=signal.SIGINT)
    assert isinstance(found, Search)
    assert found.cut_short is not None
    assert found.probes[0].verdict == "met"
    assert found.rate == max(probe.rate for probe in found.probes if probe.verdict == "met")
    async with null(Behaviour(first_s=0.05)) as url:
        words = ("sweep", "--rates", "20,30,40", "--probe-seconds", "60", "--lag-limit", "10000ms")
        swept = await interrupted(url, tmp_path / "sweep.json", *words, after=40, how=signal.SIGINT)
    assert isinstance(swept, Sweep)
    assert [point.load for point in swept.points] == [20.0]
    assert swept.points[0].run.cut_short is not None
