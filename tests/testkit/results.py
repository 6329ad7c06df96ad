"""Judge what ``--results`` of :mod:`testkit.lanes` wrote: no skip but the expected ones, and where the time went.

    python -m testkit.results .cache/results/test/*.jsonl     prints a table by room; exit code 1 for a wrong skip
    python -m testkit.results --record .cache/results/all/*.jsonl  writes tests/night.json as well, if no skip is wrong

A commit's run may be recorded as well. Recorded is what passed: a unit of tests of which each has run, with the digest
of what it followed when the run began, if nothing of that changed meanwhile. Units that were left out keep what is
recorded of them, units with a test that failed lose it. Figures by room stay those of the last whole run without one.

tests/expected_skips.toml lists each reason to skip with its count. A skip that it does not list fails the run, and so
does a listed count that a whole run does not meet, or any run exceeds: the list is then not true any more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit import lanes
from testkit.lanes import RECORD, ROOT
from testkit.processes.earlier import has_history

EXPECTED = ROOT / "tests/expected_skips.toml"
SLOWEST = 15


def _gpus() -> int:
    """GPUs of this machine; counted without torch, whose import takes seconds."""
    try:
        run = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except OSError:
        return 0
    return len(run.stdout.splitlines()) if run.returncode == 0 else 0


CONDITIONS: Mapping[str, Callable[[], bool]] = {
    "always": lambda: True,
    "no GPU": lambda: _gpus() == 0,
    "not root": lambda: os.geteuid() != 0,
    "not Linux": lambda: sys.platform != "linux",
    "no C compiler": lambda: shutil.which("cc") is None,
    "no history": lambda: not has_history(),
    "no prometheus": lambda: shutil.which("prometheus") is None,
    "no promtool": lambda: shutil.which("promtool") is None,
    "no kube tool": lambda: not os.access(os.environ.get("KUBE_TOOL", ""), os.X_OK),
}
"""When a skip is expected. Each looks at the machine by itself: a test that is wrong about its reason is seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A reason to skip: a pattern that matches the whole ``reason``, the ``runs`` in which it occurs (folders of
    results), ``when``, a key of :data:`CONDITIONS`, and how many tests give it (None: any number, as those of the night
    come and go with what has changed). ``why`` is for readers."""

    reason: str
    runs: tuple[str, ...]
    when: str
    why: str
    count: int | None = None


@dataclass(slots=True)
class Room:
    """Sums over the tests of a folder."""

    tests: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def add(self, test: Mapping[str, Any]) -> None:
        self.tests += 1
        self.skipped += test["outcome"] == "skipped"
        self.failed += test["outcome"] == "failed"
        self.seconds += test["seconds"]
        self.cpu_s += test.get("cpu_s", 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judge the results of a run of tests.")
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of --results; their folder names the run")
    parser.add_argument("--record", action="store_true", help="write tests/night.json")
    options = parser.parse_args(arguments)
    tests = [json.loads(line) for path in options.files for line in path.read_text().splitlines()]
    rooms = by_room(tests)
    print(table(rooms))
    print("\nslowest\n" + "\n".join(_slowest(tests)))
    run = options.files[0].resolve().parent.name
    faults = wrong_skips(tests, expected(run), whole=run == "all")
    failed = [test["test"] for test in tests if test["outcome"] == "failed"]
    for fault in faults:
        print(f"SKIPS: {fault}")
    if options.record and not faults:
        notes = [json.loads(path.with_suffix(".units").read_text()) for path in options.files]
        record = _record(rooms if run == "all" and not failed else None) | {
            "passed": passed(notes, tests, expected(run))
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if faults or failed or not tests else 0


def by_room(tests: Iterable[Mapping[str, Any]]) -> dict[str, Room]:
    """Rooms are folders of tests, and those of tests/unit."""
    rooms: dict[str, Room] = defaultdict(Room)
    for test in tests:
        rooms[_room(test["test"])].add(test)
    return dict(sorted(rooms.items()))


def _room(test: str) -> str:
    parts = test.partition("::")[0].split("/")[1:-1]
    return "/".join(parts[:2] if parts[:1] == ["unit"] else parts[:1])


def table(rooms: Mapping[str, Room]) -> str:
    lines = [f"{'room':<18} {'tests':>6} {'skipped':>8} {'failed':>7} {'seconds':>8} {'CPU s':>7}"]
    total = Room()
    for name, room in rooms.items():
        lines.append(_line(name, room))
        for field in ("tests", "skipped", "failed", "seconds", "cpu_s"):
            setattr(total, field, getattr(total, field) + getattr(room, field))
    return "\n".join([*lines, _line("all", total)])


def _line(name: str, room: Room) -> str:
    return f"{name:<18} {room.tests:>6} {room.skipped:>8} {room.failed:>7} {room.seconds:>8.0f} {room.cpu_s:>7.0f}"


def _slowest(tests: Iterable[Mapping[str, Any]]) -> list[str]:
    slowest = sorted(tests, key=lambda test: -float(test["seconds"]))[:SLOWEST]
    return [f"{test['seconds']:>7.1f} s {test.get('cpu_s', 0.0):>7.1f} s of CPU  {test['test']}" for test in slowest]


def expected(run: str) -> list[Expected]:
    """What tests/expected_skips.toml lists for a run, as far as its conditions hold on this machine."""
    read = tomllib.loads(EXPECTED.read_text()).get("skip", [])
    listed = [Expected(**(each | {"runs": tuple(each["runs"])})) for each in read]
    return [each for each in listed if run in each.runs and CONDITIONS[each.when]()]


def wrong_skips(tests: Iterable[Mapping[str, Any]], listed: Sequence[Expected], *, whole: bool) -> list[str]:
    """Return a sentence for each reason that is not listed or whose count is another.

    Where the run is not ``whole``, a smaller one is no fault: tests that skip are among those that it leaves out.
    """
    found = Counter(test["reason"] for test in tests if test["outcome"] == "skipped")
    faults, matched = [], Counter[Expected]()
    for reason, count in found.items():
        match = next((each for each in listed if re.fullmatch(each.reason, reason)), None)
        if match is None:
            faults.append(f"{count} tests skip for a reason that is not listed: {reason}")
        else:
            matched[match] += count
    missed = [
        each
        for each in listed
        if each.count is not None and (matched[each] > each.count or (whole and matched[each] < each.count))
    ]
    return faults + [f"{matched[each]} tests skip for {each.reason!r}, and {each.count} are listed" for each in missed]


def _record(rooms: Mapping[str, Room] | None) -> dict[str, Any]:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    said = {"commit": commit.stdout.strip(), "date": datetime.date.today().isoformat()}
    if rooms is None:
        return said | {"rooms": json.loads(RECORD.read_text())["rooms"] if RECORD.exists() else {}}
    figures = {
        name: {"tests": room.tests, "skipped": room.skipped, "seconds": round(room.seconds), "cpu_s": round(room.cpu_s)}
        for name, room in rooms.items()
    }
    for name, lines in lines_by_room().items():
        figures.setdefault(name, {})["lines"] = lines
    return said | {"rooms": figures}


def passed(
    notes: Sequence[Mapping[str, Mapping[str, Any]]], tests: Iterable[Mapping[str, Any]], listed: Sequence[Expected]
) -> dict[str, dict[str, str | None]]:
    """What :data:`testkit.lanes.RECORD` says of each unit after a run: its digest if all of it passed, None if a test
    of it failed, else what it said before.

    Args:
        notes: what :mod:`testkit.lanes` noted of each part of the run.
        tests: the lines of all parts.
        listed: expected skips. Those without a count depend on the machine, or come and go: they are no pass.
    """
    counted = [each.reason for each in listed if each.count is not None]
    tests = list(tests)
    red = {test["test"] for test in tests if test["outcome"] == "failed"}
    green = {
        test["test"]
        for test in tests
        if test["outcome"] == "passed"
        or (test["outcome"] == "skipped" and any(re.fullmatch(reason, test["reason"]) for reason in counted))
    }
    known = json.loads(RECORD.read_text()).get("passed", {}) if RECORD.exists() else {}
    found: dict[str, dict[str, str | None]] = {}
    for note in notes:
        for file, units in note.items():
            for key, unit in units.items():
                digest = known.get(file, {}).get(key)
                if not red.isdisjoint(unit["tests"]):
                    digest = None
                elif unit["all"] and green.issuperset(unit["tests"]) and lanes.digest(file, key) == unit["digest"]:
                    digest = unit["digest"]
                found.setdefault(file, {})[key] = digest
    return {file: units for file, units in sorted((known | found).items()) if (ROOT / file).is_file()}


def lines_by_room() -> dict[str, int]:
    """Lines of Python by room, testkit included."""
    lines: Counter[str] = Counter()
    for path in (ROOT / "tests").rglob("*.py"):
        room = _room(str(path.relative_to(ROOT))) or "conftest"
        lines[room] += len(path.read_text().splitlines())
    return dict(sorted(lines.items()))


if __name__ == "__main__":
    sys.exit(main())
