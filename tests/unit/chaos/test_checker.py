"""Histories that keep the rules, and one for each way to break one."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.checker import RULES, Bounds, Findings, check
from chaos.clients import fate
from chaos.history import History, Line

from loadgen.client import StreamResult

BOUNDS = Bounds(refused_share=0.5, refused_s=5.0, gap_s=5.0)
ANSWER = "answer ids=5,6,7 text=abc finish=length"
WELL = (ANSWER, "1 invoke", "2 admitted", "3 tokens ids=5", "4 tokens index=1 ids=6,7", "5 end text=abc finish=length")


def line(text: str) -> Line:
    """``[at] what field=value ...`` of request ``k``."""
    words = text.split()
    at = float(words.pop(0)) if words[0][0].isdigit() else 0.0
    facts: dict[str, object] = dict(word.split("=") for word in words[1:])
    facts |= {name: int(str(facts[name])) for name in ("index", "status") if name in facts}
    facts |= {"ids": tuple(map(int, str(facts["ids"]).split(",")))} if "ids" in facts else {}
    return Line(what=words[0], at=at, **({"key": "k"} | facts))  # type: ignore[arg-type]


def judged(*texts: str) -> Findings:
    return check(map(line, texts))


def test_an_answer_in_one_try_or_in_several_is_right() -> None:
    assert judged(*WELL).over(BOUNDS) == []
    several = [
        "1 invoke",
        "1 refused",
        "2 admitted",
        "3 tokens ids=5,6",
        "4 broken",
        "5 admitted",
        "6 tokens ids=5,6,7",
    ]
    found = judged(ANSWER, *several, WELL[-1])
    assert found.over(Bounds(refused_share=1, refused_s=1, gap_s=3)) == []
    assert (found.tries, found.refusals, found.broken, found.refused_s, found.longest_gap_s) == (3, 1, 1, 1, 3)


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        ("lost", WELL[:-1]),
        ("lost", (*WELL[:-1], "5 failed text=gone")),
        ("lost", (*WELL[:4], WELL[-1])),
        ("doubled", (*WELL, WELL[-1])),
        ("doubled", (*WELL, "6 failed")),
        ("changed", (*WELL[:4], "4 tokens index=1 ids=6,8", WELL[-1])),
        ("changed", (*WELL[:-1], "5 end text=abd finish=length")),
        ("changed", (*WELL[:-1], "5 end text=abc finish=stop")),
        ("repeated", (*WELL[:5], "4 tokens index=2 ids=7", WELL[-1])),
        ("skipped", (*WELL[:4], "4 tokens index=2 ids=7", WELL[-1])),
        ("skipped", (*WELL[:4], "4 broken", "5 admitted", WELL[4], WELL[-1])),
        ("early", (*WELL[:2], *WELL[3:])),
        ("early", (*WELL[:2], "2 end text=abc finish=length")),
        ("early", (*WELL[:3], "2 refused status=503", *WELL[3:])),
        ("early", (*WELL[:2], "2 broken", *WELL[2:])),
        ("late", (*WELL, "6 tokens index=3 ids=7")),
        ("late", (*WELL, "6 refused")),
        ("unknown", ("1 tokens ids=5", *WELL)),
        ("unknown", (*WELL[:2], *WELL[1:])),
    ],
)
def test_each_rule_can_be_broken(rule: str, texts: tuple[str, ...]) -> None:
    found = judged(*texts)
    assert RULES[rule] in found.examples[0]
    assert f"history: {found.problems[rule]} {rule}" in found.over(BOUNDS)


def test_refusals_are_bounded_in_share_and_in_time() -> None:
    other = [f"{text} key=other" for text in WELL[1:]]
    found = judged(*WELL[:2], "1 refused", "4 refused", "7 refused", "9 admitted", *WELL[3:], *other)
    assert (found.refused_share, found.refusals, found.refused_s, found.outage_s) == (0.5, 3, 8, 8)
    assert found.over(BOUNDS) == ["a client was refused for 8.0 s, over 5 s"]
    assert len(found.over(Bounds(refused_share=0.4, refused_s=8, gap_s=5))) == 1
    assert judged(*WELL[:2], "1 refused", *other, "9 refused").refused_s == 8, "also where it was never admitted"
    both = judged(*WELL[:2], "1 refused", *[f"3{text[1:]} key=other" for text in WELL[1:4]], "9 admitted")
    assert both.outage_s == 2, "another client was admitted meanwhile"


def test_a_gap_may_last_some_leases_beyond_the_faults_in_it() -> None:
    stopped = ["3 fault key=stop", "7 over key=stop"]
    late = ["12 tokens index=1 ids=6,7", "12 end text=abc finish=length"]
    found = judged(*WELL[:4], *stopped, *late)
    assert (found.longest_gap_s, found.excess_s) == (9, 5)
    assert found.over(BOUNDS) == []
    assert judged(*WELL[:4], *late).over(BOUNDS) == ["a gap between tokens outlasted its faults by 9.0 s, over 5 s"]
    replayed = [*WELL[:4], "4 broken", "5 admitted", "6 tokens ids=5", *late]
    assert judged(*replayed).longest_gap_s == 9, "a token that came before ends no gap"


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    with History(tmp_path / "new" / "history.jsonl") as history:
        history.add("answer", ids=(5, 6), text="a", finish="length")
        history.add("tokens", key="k", index=1, ids=(6,))
        first, second = history.lines()
    assert (first.what, first.ids, first.text) == ("answer", (5, 6), "a")
    assert (second.what, second.key, second.index, second.ids) == ("tokens", "k", 1, (6,))
    assert 0 < first.at <= second.at


@pytest.mark.parametrize(
    ("status", "finish", "error", "broken", "became"),
    [
        (200, "length, [DONE]", None, False, "end"),
        (200, "length", None, False, "broken"),
        (200, None, None, False, "broken"),
        (200, None, "gone", True, "broken"),
        (200, None, "{'message': 'gone'}", False, "failed"),
        (503, None, "later", False, "refused"),
        (429, None, "later", False, "refused"),
        (0, None, "no route", True, "refused"),
        (500, None, "oops", False, "failed"),
        (409, None, "conflict", False, "failed"),
    ],
)
def test_what_became_of_a_try(status: int, finish: str | None, error: str | None, broken: bool, became: str) -> None:
    result = StreamResult(started=0.0, status=status, finish_reason=finish, done="[DONE]" in str(finish), error=error)
    assert fate(result, broken=broken) == became
