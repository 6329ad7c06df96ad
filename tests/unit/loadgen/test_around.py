"""What a run has around it: options in; events in a process of their own, series and the machine out."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import msgspec
import pytest
from testkit.load_results import a_run

from loadgen.around import PROMETHEUS_ENV, Around, add_options
from loadgen.errors import BadSetting, ServerUnusable
from loadgen.events.apart import Apart
from loadgen.events.follow import NOT_REACHED
from loadgen.events.host import EventImpossible
from loadgen.events.kube import KubeHost
from loadgen.events.local import LocalHost
from loadgen.events.plan import Planned, planned
from loadgen.results import Run

URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def run() -> Run:
    return a_run(seconds=2)


def around(*words: str) -> Around:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return Around.from_args(parser.parse_args(words), URL)


def test_without_options_there_is_nothing_but_the_machine(run: Run) -> None:
    plain = around()
    plain.check()
    with plain.following() as following:
        following.begin(time.time())
    found = plain.complete(run)
    assert (found.events, found.series, found.settings) == ([], [], run.settings)
    assert found.environment["cpus"] == len(os.sched_getaffinity(0))


def test_events_happen_in_another_process_at_their_times(run: Run, tmp_path: Path) -> None:
    note, after = tmp_path / "note", tmp_path / "after"
    texts = [f"1s:run:cat /proc/$PPID/stat > {note}", f"3s:run:touch {after}", "0:run:exit 4", "1h:run:true"]
    busy = around(*(word for text in texts for word in ("--event", text)))
    busy.check()
    with busy.following() as following:
        following.begin(time.time())
        while not after.exists():  # the earlier ones have ended by then
            time.sleep(0.01)
    first, second, _, last = busy.complete(run).events
    assert (first.target, second.error, last.error) == ("exit 4", None, NOT_REACHED)
    assert first.error is not None
    assert "ended with 4" in first.error
    assert second.began_s is not None
    assert second.began_s >= 1.0
    parent = int(note.read_text().split()[0])
    assert parent != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(parent, 0)


def test_a_load_that_does_not_begin_has_no_events(tmp_path: Path) -> None:
    def fails() -> Apart:
        with Apart([planned(f"0:run:touch {tmp_path}/made")], LocalHost(URL)) as following:
            left.append(following)
            raise ZeroDivisionError

    left: list[Apart] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert [event.error for event in left[0].events] == [NOT_REACHED]
    assert not (tmp_path / "made").exists()


class _Broken:
    """A host with a fault, which it says that it has met."""

    def __init__(self, met: Path) -> None:
        self._met = met

    async def find(self, event: Planned) -> str:
        return event.target

    async def act(self, event: Planned) -> str:
        self._met.touch()
        raise ZeroDivisionError(event)


def test_a_fault_of_the_other_process_is_raised_here(tmp_path: Path) -> None:
    def meets_it() -> None:
        with Apart([planned("0:kill:a")], _Broken(tmp_path / "met")) as following:
            following.begin(time.time())
            while not (tmp_path / "met").exists():
                time.sleep(0.01)

    with pytest.raises(ZeroDivisionError):
        meets_it()


def test_a_release_is_reached_by_kubectl_and_else_it_is_this_machine() -> None:
    assert isinstance(around().host, LocalHost)
    host = around("--release", "mesh", "--kube-namespace", "there", "--context", "kind").host
    assert isinstance(host, KubeHost)
    assert host.kubectl == ("kubectl", "--context", "kind", "--namespace", "there")
    for words in (["--kube-namespace", "there"], ["--context", "kind"]):
        with pytest.raises(BadSetting, match="Give --release NAME"):
            around(*words)


def test_what_cannot_happen_is_found_before_the_load() -> None:
    with pytest.raises(BadSetting, match="run true at 30 s comes after the load, which takes 20 s"):
        around("--event", "20s:run:true", "--event", "30s:run:true").check(20.0)
    with pytest.raises(EventImpossible, match="no process experts-1"):
        around("--event", "30s:kill:experts-1").check()
    with pytest.raises(ServerUnusable, match="No Prometheus answers"):
        around("--prometheus", URL).check()


def test_prometheus_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    assert around().prometheus is None
    monkeypatch.setenv(PROMETHEUS_ENV, URL)
    found = around("--query", "Up=up").complete(run)
    assert found.series[-1].name == "Up"
    assert all(series.error for series in found.series)
    monkeypatch.delenv(PROMETHEUS_ENV)
    for words in (["--query", "a=b"], ["--matchers", "a"]):
        with pytest.raises(BadSetting, match="need a Prometheus"):
            around(*words)


def test_the_price_is_kept_with_the_run(run: Run) -> None:
    priced = around("--gpus", "4", "--price-per-gpu-hour", "2.5").complete(run)
    assert {"gpus": 4.0, "price_per_gpu_hour": 2.5}.items() <= priced.settings.items()
    assert msgspec.json.decode(msgspec.json.encode(priced))["settings"]["gpus"] == 4.0
    for words in (["--gpus", "0"], ["--price-per-gpu-hour", "inf"]):
        with pytest.raises(BadSetting, match="is not above 0"):
            around(*words)
