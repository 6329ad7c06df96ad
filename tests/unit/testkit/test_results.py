"""The judge of a run: a skip that nobody expects is a fault, and a failure is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit import lanes, results
from testkit.results import CONDITIONS, EXPECTED, Expected, by_room, expected, main, wrong_skips

NO_ROOT = Expected(reason="no root: .*", runs=("commit",), count=2, when="always", why="")
NO_TOOL = Expected(reason="no tool", runs=("commit",), when="always", why="")


def line(test: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": 1.0, "cpu_s": 0.5} | more


def skips(*reasons: str) -> list[dict[str, Any]]:
    return [line(f"tests/flow/test_a.py::{at}", "skipped", reason=reason) for at, reason in enumerate(reasons)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("reasons", "listed", "faults"),
    [
        ([], [], []),
        (["no root: a", "no root: b"], [NO_ROOT], []),
        (["no root: a"], [NO_ROOT], ["1 tests skip for 'no root: .*', and 2 are listed"]),
        ([], [NO_ROOT], ["0 tests skip for 'no root: .*', and 2 are listed"]),
        (["no root: a"] * 3, [NO_ROOT], ["3 tests skip for 'no root: .*', and 2 are listed"]),
        (["no tool"] * 7, [NO_TOOL], []),
        ([], [NO_TOOL], []),
        (["no GPU"], [], ["1 tests skip for a reason that is not listed: no GPU"]),
        (["xfail: later"], [], ["1 tests skip for a reason that is not listed: xfail: later"]),
    ],
)
def test_skips_are_those_that_are_listed(
    reasons: list[str], listed: list[Expected], faults: list[str], whole: bool
) -> None:
    """A run that is not whole leaves tests out, and may have fewer."""
    too_few = NO_ROOT in listed and len(reasons) < 2
    assert wrong_skips(skips(*reasons), listed, whole=whole) == ([] if too_few and not whole else faults)


def test_each_listed_skip_names_a_condition_and_says_why() -> None:
    assert EXPECTED.exists()
    for run in ("commit", "all", "cluster-dry"):
        for each in expected(run):
            assert each.when in CONDITIONS
            assert each.why


def test_rooms_are_folders_and_those_of_unit() -> None:
    tests = [line("tests/unit/queue/test_a.py::x"), line("tests/unit/queue/test_b.py::y", "failed"), *skips("z")]
    found = by_room(tests)
    assert list(found) == ["flow", "unit/queue"]
    assert (found["unit/queue"].tests, found["unit/queue"].failed, found["unit/queue"].cpu_s) == (2, 1, 1.0)
    assert found["flow"].skipped == 1


@pytest.mark.parametrize(
    ("outcome", "code", "recorded"), [("passed", 0, True), ("failed", 1, True), ("skipped", 1, False)]
)
def test_the_exit_code_says_whether_all_is_well(
    outcome: str, code: int, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "night.json"
    monkeypatch.setattr(results, "RECORD", record)
    record.write_text('{"rooms": {"flow": {"tests": 7}}}')
    file = tmp_path / "commit/all.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(line("tests/flow/test_a.py::x", outcome, reason="never heard of")) + "\n")
    here = "tests/unit/testkit/test_results.py"
    unit = {"digest": lanes.digest(here, lanes.IMPORTS), "tests": ["tests/flow/test_a.py::x"], "all": True}
    file.with_suffix(".units").write_text(json.dumps({here: {lanes.IMPORTS: unit}}))
    assert main([str(file), "--record"]) == code
    after = json.loads(record.read_text())
    assert after["rooms"] == {"flow": {"tests": 7}}
    digest = unit["digest"] if outcome == "passed" else None
    assert after.get("passed") == ({here: {lanes.IMPORTS: digest}} if recorded else None)


@pytest.mark.parametrize(("listed", "pass_"), [([NO_ROOT], True), ([NO_TOOL], False), ([], False)])
def test_a_skip_that_is_counted_is_a_pass(
    listed: list[Expected], pass_: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others depend on the machine: where they do not skip the test may fail."""
    monkeypatch.setattr(results, "RECORD", tmp_path / "night.json")
    here, [skip] = "tests/unit/testkit/test_results.py", skips("no root: a" if pass_ else "no tool")
    unit = {"digest": lanes.digest(here, lanes.IMPORTS), "tests": [skip["test"]], "all": True}
    found = results.passed([{here: {lanes.IMPORTS: unit}}], [skip], listed)
    assert found == {here: {lanes.IMPORTS: unit["digest"] if pass_ else None}}


def test_a_run_without_tests_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "commit/all.jsonl"
    file.parent.mkdir()
    file.write_text("")
    assert main([str(file)]) == 1
