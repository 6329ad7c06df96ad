"""``expertmesh-load report`` and ``diff``: results files in; pages, XML, JSON and lines for a terminal out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen.errors import INVALID, MISSED, OK, BadSetting
from loadgen.report import diff as differences
from loadgen.report import html, junit
from loadgen.report.compare import Limits
from loadgen.report.text import summary
from loadgen.report.verdict import exit_code, verdict
from loadgen.results import Results, Run, read


def report(argv: Sequence[str]) -> int:
    """Writes what is asked for, prints the summary, and returns the exit code that the run itself had.

    Raises:
        ResultsUnreadable: there is no such file, or it has another form.
        BadSetting: an option is wrong.
    """
    parser = argparse.ArgumentParser(prog="expertmesh-load report", description=report.__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("results", type=Path, help="file that run, search or sweep wrote")
    parser.add_argument("-o", "--html", type=Path, metavar="FILE", help="a page for a browser, in one file")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="JUnit XML, for build servers")
    parser.add_argument("--json", action="store_true", help="print the verdict and its findings as JSON instead")
    parser.add_argument("--gpus", type=float, metavar="N", help="GPUs of the server (default: the run's own)")
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="PRICE", help="for the cost of a million tokens")
    given = parser.parse_args(argv)
    results = _priced(read(given.results), given)
    if given.html:
        html.write(given.html, results)
    if given.junit:
        junit.write(given.junit, results)
    print(_as_json(results) if given.json else summary(results), end="")
    return exit_code(results)


def _priced(results: Results, given: argparse.Namespace) -> Results:
    """Returns ``results`` with the GPUs and the price of the command line."""
    own = {name: getattr(given, name) for name in ("gpus", "price_per_gpu_hour") if getattr(given, name) is not None}
    if any(not 0 < value < float("inf") for value in own.values()):
        raise BadSetting("--gpus and --price-per-gpu-hour are above 0.")
    if not own or not isinstance(results, Run):
        return results
    return msgspec.structs.replace(results, settings=results.settings | own)


def _as_json(results: Results) -> str:
    found = verdict(results)
    said = [{"level": finding.level.name.lower(), "text": finding.text} for finding in found.findings]
    return json.dumps({"verdict": found.word, "level": found.level.name.lower(), "findings": said}, indent=1) + "\n"


def diff(argv: Sequence[str]) -> int:
    """Compares two results files. Returns 1 if the later one is worse beyond the threshold, 3 for an invalid one, or 0.

    Raises:
        ResultsUnreadable: a file is missing or of another kind.
        BadSetting: an option is wrong.
    """
    parser = argparse.ArgumentParser(prog="expertmesh-load diff", description=diff.__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("before", type=Path, help="results of the earlier run, search or sweep")
    parser.add_argument("after", type=Path, help="results of the later one")
    parser.add_argument(
        "--threshold", type=float, default=5.0, metavar="PERCENT", help="smaller changes do not count (default: 5)"
    )
    parser.add_argument(
        "--confidence", type=float, default=99.0, metavar="PERCENT", help="of the intervals (default: 99)"
    )
    parser.add_argument("--json", action="store_true", help="print the differences as JSON instead")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="JUnit XML, for build servers")
    given = parser.parse_args(argv)
    if not (0 <= given.threshold < 1000 and 50 <= given.confidence < 100):
        raise BadSetting("--threshold is 0 or more, and --confidence at least 50 and below 100.")
    limits = Limits(threshold=given.threshold / 100, confidence=given.confidence / 100)
    found = differences.diff(read(given.before), read(given.after), limits)
    if given.junit:
        given.junit.parent.mkdir(parents=True, exist_ok=True)
        name = f"{given.after.name} against {given.before.name}"
        given.junit.write_bytes(junit.suite(name, differences.cases(found, limits), 0.0))
    if given.json:
        json.dump(differences.as_json(found, limits), sys.stdout, indent=1)
        print()
    else:
        print(differences.text(found, limits), end="")
    return INVALID if found.invalid else MISSED if found.verdict == "worse" else OK
