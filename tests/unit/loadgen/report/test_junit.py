"""JUnit XML of results: build servers can read it, and a test case fails for each thing that is not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from testkit.load_results import a_disturbed_run, a_run, wrong

from loadgen.report import junit
from loadgen.results import Correctness, Counts, ErrorGroup, Event, Objective, Run, Validity

from .test_page import HOSTILE, a_search, a_sweep, hostile


@pytest.fixture(scope="module")
def good() -> Run:
    return a_run(seconds=3)


def failures(run: Any, tmp_path: Path) -> dict[str, str | None]:
    """Test cases with their failures' texts, as another program reads them."""
    file = tmp_path / "made/junit.xml"
    junit.write(file, run)
    root = ElementTree.parse(file).getroot()
    assert root.tag == "testsuites"
    [suite] = root
    found = {str(case.get("name")): case.findtext("failure") for case in suite.iter("testcase")}
    failed = sum(text is not None for text in found.values())
    for each in (root, suite):
        assert (each.get("tests"), each.get("failures"), each.get("errors")) == (str(len(found)), str(failed), "0")
    return found


def test_a_good_run_passes(good: Run, tmp_path: Path) -> None:
    met = Objective(metric="ttft", percentile=99, target_ms=500, value_ms=312, met=True)
    whole = msgspec.structs.replace(good, objectives=[met], correctness=Correctness(reference="a", checked=9, wrong=0))
    found = failures(whole, tmp_path)
    names = ["the run is valid", "requests were answered", "answers are right", "TTFT p99 is at most 500 ms"]
    assert found == dict.fromkeys(names)


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "late": (
        {"validity": Validity(valid=False, lag_p99_ms=9, reasons=["late by 9 ms"])},
        "the run is valid",
        "late by 9 ms",
    ),
    "failed": (
        {
            "counts": Counts(scheduled=9, ok=6, failed=2, timeout=1),
            "errors": [ErrorGroup(kind="http 500", count=2, first_at_s=0, last_at_s=1, example="oh")],
        },
        "requests were answered",
        "3 of 9 requests failed\n2 x http 500: oh",
    ),
    "wrong": (
        {"correctness": Correctness(reference="a", checked=9, wrong=1, examples=[wrong()])},
        "answers are right",
        "1 of 9 answers are wrong\nrequest 7: 'a lighthouse', found 'a light'",
    ),
    "slo": (
        {"objectives": [Objective(metric="itl", percentile=95, target_ms=40, value_ms=61, met=False)]},
        "ITL p95 is at most 40 ms",
        "measured 61 ms",
    ),
    "event": (
        {"events": [Event(at_s=30, action="kill", target="experts-9", error="not there")]},
        "event 1 happened: kill experts-9 at 30 s",
        "not there",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_kept_fails(good: Run, tmp_path: Path, case: str) -> None:
    changes, name, says = CASES[case]
    found = failures(msgspec.structs.replace(good, **changes), tmp_path)
    assert {each: text for each, text in found.items() if text is not None} == {name: says}


def test_a_search_and_a_sweep_have_suites(good: Run, tmp_path: Path) -> None:
    search = a_search(good)
    assert failures(search, tmp_path) == {"a rate keeps the SLO": None, "answers are right": None}
    none = failures(msgspec.structs.replace(search, rate=None), tmp_path)
    assert "No rate kept the SLO" in str(none["a rate keeps the SLO"])
    assert failures(a_sweep(good), tmp_path) == {"valid at 1": None, "valid at 2": None}
    late = msgspec.structs.replace(good, validity=Validity(valid=False, lag_p99_ms=9))
    assert list(failures(a_sweep(late), tmp_path)) == ["invalid at 1", "invalid at 2"]


def test_hostile_words_and_control_characters_are_text(good: Run, tmp_path: Path) -> None:
    found = failures(hostile(good), tmp_path)
    assert found["the run is valid"] == HOSTILE
    label = msgspec.structs.replace(
        good, label="a\x00b\x1b[31m\ud800c", validity=Validity(valid=False, lag_p99_ms=1, reasons=["\x07"])
    )
    assert failures(label, tmp_path)["the run is valid"] == "\ufffd"


def test_what_happened_is_among_the_cases(tmp_path: Path) -> None:
    found = failures(a_disturbed_run(seconds=10), tmp_path)
    assert found["event 1 happened: kill experts-1 at 30 s"] is None
    assert "no replica of a shard group" in str(found["requests were answered"])
