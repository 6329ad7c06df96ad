"""`expertmesh-load report` and `diff`: files in; files, lines and exit codes out."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from testkit.load_results import a_disturbed_run, a_run, log_normal

from loadgen.errors import INVALID, MISSED, OK, BadSetting, ResultsUnreadable
from loadgen.report.command import diff, report
from loadgen.report.cost import cost
from loadgen.report.text import summary
from loadgen.results import ErrorGroup, Event, Rates, Run, Target, Validity, write

from .test_page import a_search, a_sweep


@pytest.fixture(scope="module")
def run() -> Run:
    return a_run(seconds=12, rate=30.0, tokens=3)


@pytest.fixture
def file(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    write(path, run)
    return path


def test_a_report_writes_what_is_asked_for(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, suite = tmp_path / "out/page.html", tmp_path / "out/junit.xml"
    words = [str(file), "-o", str(page), "--junit", str(suite), "--gpus", "4", "--price-per-gpu-hour", "2.5"]
    assert report(words) == OK
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "VALID: Answers were not checked. No SLO was given."
    for words in ("TTFT from sending", "p99.9", "output tokens", "cost of a million output tokens"):
        assert words in said
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "cost of a million output tokens" in page.read_text(encoding="utf-8")
    assert ElementTree.parse(suite).getroot().get("failures") == "0"


def test_a_verdict_can_be_read_by_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(file), "--json"]) == OK
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["level"]) == ("VALID", "good")
    assert [each["text"] for each in said["findings"]] == ["Answers were not checked.", "No SLO was given."]


def test_its_exit_code_is_that_of_the_run(run: Run, tmp_path: Path) -> None:
    late = msgspec.structs.replace(run, validity=Validity(valid=False, lag_p99_ms=9))
    missed = msgspec.structs.replace(run, events=[Event(at_s=1, action="kill", target="a", error="gone")])
    codes = []
    for each in (late, missed):
        write(tmp_path / "a.json", each)
        codes.append(report([str(tmp_path / "a.json")]))
    assert codes == [INVALID, MISSED]


def test_what_is_wrong_is_said(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultsUnreadable, match="No such file"):
        report([str(tmp_path / "none.json")])
    (tmp_path / "other.json").write_text('{"kind": "dance"}')
    with pytest.raises(ResultsUnreadable, match="is no results file"):
        report([str(tmp_path / "other.json")])
    for words in (["--gpus", "0"], ["--gpus", "inf"], ["--price-per-gpu-hour", "-1"]):
        with pytest.raises(BadSetting, match="above 0"):
            report([str(file), *words])


def test_the_cost_of_a_million_tokens_follows_from_price_and_rate(run: Run) -> None:
    """4 GPUs at 3.00 an hour make 12.00 an hour; 1000 tokens a second are 3.6 million an hour."""
    settings = {"gpus": 4, "price_per_gpu_hour": 3.0}
    priced = msgspec.structs.replace(
        run, settings=settings, rates=Rates(requests=1, output_tokens=1000), duration_s=1800.0
    )
    found = cost(priced)
    assert found is not None
    assert (found.gpu_hours, found.of_run, found.output_tokens_per_gpu_hour) == (2.0, 6.0, 900_000)
    assert found.per_million_output_tokens == pytest.approx(12 / 3.6)
    assert cost(run) is None
    unpriced = cost(msgspec.structs.replace(priced, settings={"gpus": 4}))
    assert unpriced is not None
    assert (unpriced.of_run, unpriced.per_million_output_tokens) == (None, None)


def test_all_kinds_have_a_summary_without_control_characters(run: Run) -> None:
    target = Target(url="http://a\x1b]0;b\x07", model="\x1b[31mred")
    errors = [ErrorGroup(kind="a\nb", count=1, first_at_s=0, last_at_s=1, example="\x1b[2J")]
    bad = msgspec.structs.replace(a_disturbed_run(seconds=10), target=target, errors=errors)
    for results in (bad, a_search(bad), a_sweep(bad), run):
        said = summary(results)
        assert said.replace("\n", "").isprintable()
        assert max(map(len, said.splitlines()[3:])) < 200


def test_a_diff_ends_with_1_where_the_later_run_is_worse(
    file: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later, suite = tmp_path / "later.json", tmp_path / "junit.xml"
    write(later, a_run(seconds=12, rate=30.0, tokens=3, ttft=log_normal(200.0)))
    assert diff([str(file), str(later), "--junit", str(suite)]) == MISSED
    said = capsys.readouterr().out
    assert said.startswith("WORSE: Worse in TTFT p50, TTFT p99")
    failed = [
        case.get("name")
        for case in ElementTree.parse(suite).getroot().iter("testcase")
        if case.find("failure") is not None
    ]
    assert failed[:2] == ["TTFT p50 is not worse", "TTFT p99 is not worse"]
    assert diff([str(later), str(file)]) == OK
    assert capsys.readouterr().out.startswith("BETTER: Better in TTFT p50")
    assert diff([str(file), str(later), "--threshold", "200"]) == OK
    write(later, msgspec.structs.replace(run, validity=Validity(valid=False, lag_p99_ms=9)))
    assert diff([str(file), str(later)]) == INVALID


def test_a_diff_can_be_read_by_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff([str(file), str(file), "--json", "--confidence", "95"]) == OK
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["threshold"], said["confidence"]) == ("none", 0.05, 0.95)
    [part] = said["parts"]
    assert {each["name"]: each["change"] for each in part["differences"]}["TTFT p99"] == 0.0


@pytest.mark.parametrize("words", [["--threshold", "-1"], ["--confidence", "100"], ["--confidence", "20"]])
def test_a_diff_refuses_what_cannot_be(file: Path, words: list[str]) -> None:
    with pytest.raises(BadSetting, match="--threshold is 0 or more"):
        diff([str(file), str(file), *words])
