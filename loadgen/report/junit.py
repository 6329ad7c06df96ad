"""A results file as JUnit XML, for build servers: what a run must keep is a test case each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from loadgen.report.verdict import Level, verdict
from loadgen.report.words import METRICS, amount, ms, percentile
from loadgen.results import Results, Run, Search

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot have, not even escaped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``failure`` says why it failed; None: it passed. ``said`` is what was found in any case."""

    name: str
    failure: str | None = None
    said: str = ""


def write(path: Path, results: Results) -> None:
    """Writes the test suite of ``results`` to ``path``, whose folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    duration = results.duration_s if isinstance(results, Run) else 0.0
    path.write_bytes(suite(results.label or results.target.model, cases(results), duration))


def cases(results: Results) -> list[Case]:
    """Returns what ``results`` must keep."""
    return [*_cut_short(results), *_kept(results)]


def _cut_short(results: Results) -> Iterator[Case]:
    if (cut := results.cut_short) is not None:
        yield Case(name="it came to its end", failure=f"{cut.signal} ended it after {cut.at_s:.0f} s")


def _kept(results: Results) -> list[Case]:
    if isinstance(results, Run):
        return list(_of_run(results))
    if isinstance(results, Search):
        return list(_of_search(results))
    return [
        Case(
            name=f"{found.word.lower()} at {amount(point.load)}",
            failure=None if found.level == Level.GOOD else found.text,
        )
        for point in results.points
        for found in [verdict(point.run)]
    ]


def suite(name: str, found: Sequence[Case], duration_s: float) -> bytes:
    """Returns the XML of a suite of ``found``."""
    failed = sum(case.failure is not None for case in found)
    counts = {"tests": str(len(found)), "failures": str(failed), "errors": "0", "time": f"{duration_s:.3f}"}
    root = ElementTree.Element("testsuites", {"name": "expertmesh-load", **counts})
    parent = ElementTree.SubElement(root, "testsuite", {"name": _clean(name), **counts})
    for case in found:
        node = ElementTree.SubElement(parent, "testcase", {"classname": "expertmesh-load", "name": _clean(case.name)})
        if case.failure is not None:
            failure = _clean(case.failure)
            ElementTree.SubElement(node, "failure", {"message": failure.splitlines()[0][:200]}).text = failure
        if case.said:
            ElementTree.SubElement(node, "system-out").text = _clean(case.said)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def _of_run(run: Run) -> Iterator[Case]:
    counts = run.counts
    reasons = "; ".join(run.validity.reasons) or "no reason is given"
    yield Case(name="the run is valid", failure=None if run.validity.valid else reasons)
    bad = counts.failed + counts.timeout
    kinds = "\n".join(f"{each.count} x {each.kind}: {each.example}" for each in run.errors)
    failed = f"{bad} of {counts.scheduled} requests failed\n{kinds}" if bad else None
    yield Case(name="requests were answered", failure=failed, said=f"{counts.ok} of {counts.scheduled} ok")
    if run.correctness is not None:
        checked = run.correctness
        examples = "\n".join(
            f"request {each.number}: {each.expected!r}, found {each.found!r}" for each in checked.examples
        )
        wrong = f"{checked.wrong} of {checked.checked} answers are wrong\n{examples}" if checked.wrong else None
        yield Case(name="answers are right", failure=wrong, said=f"{checked.checked} checked by {checked.reference}")
    for each in run.objectives:
        name = f"{METRICS[each.metric]} {percentile(each.percentile)} is at most {ms(each.target_ms)}"
        said = f"measured {ms(each.value_ms)}"
        yield Case(name=name, failure=None if each.met else said, said=said)
    for number, event in enumerate(run.events, start=1):
        name = f"event {number} happened: {event.action} {event.target} at {event.at_s:g} s"
        yield Case(name=name, failure=event.error, said=event.detail)


def _of_search(search: Search) -> Iterator[Case]:
    found = verdict(search)
    failure = None if search.rate is not None else found.text
    yield Case(name="a rate keeps the SLO", failure=failure, said=found.text)
    wrong = sum(probe.run.counts.wrong for probe in search.probes)
    yield Case(name="answers are right", failure=f"{wrong} answers are wrong" if wrong else None)
