"""Which tests a run takes, and how long each of them took.

``--lane commit`` leaves out the tests that are marked ``night``, unless what they follow has changed since the last
night that is recorded (:data:`RECORD`)::

    @pytest.mark.night  # runs at night, and when its own file has changed
    @pytest.mark.night("kernels/moe_kernels/training")  # and when something under this path has changed

Whole folders that follow something are in tests/lanes.toml. ``--lane all``, which is also what a plain ``pytest`` does,
takes every test. ``--results=FILE`` writes a JSON line for each test, which :mod:`testkit.results` reads.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/night.json"
"""The last run of all tests that was green: its commit, and tests, seconds and lines by room."""


LANES = ROOT / "tests/lanes.toml"


def add_options(parser: pytest.Parser) -> None:
    """For ``pytest_addoption`` of a conftest, which pytest reads before it registers this module."""
    group = parser.getgroup("lanes")
    group.addoption("--lane", choices=("all", "commit"), default="all", help="commit: without tests marked night")
    group.addoption("--results", type=Path, help="write a JSON line for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("results")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Results(path))


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("lane") == "all":
        return None
    found = changed(night_commit())
    if found is None:
        return f"lane: everything, as the history has no {night_commit()[:12]}, whose night is recorded"
    return f"lane: commit; {len(found)} files changed since the night of {night_commit()[:12]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("lane") == "all" or (found := changed(night_commit())) is None:
        return
    taken: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if _of_the_night(item, found) else taken).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = taken


def _of_the_night(item: pytest.Item, found: frozenset[str]) -> bool:
    file = str(item.path.relative_to(ROOT))
    followed = [path for mark in item.iter_markers("night") for path in (file, *mark.args)]
    followed += [path for folder, paths in _folders().items() if below(file, folder) for path in (folder, *paths)]
    return bool(followed) and not any(below(name, path) for name in found for path in followed)


def below(name: str, path: str) -> bool:
    """Whether ``name`` is the path or under it."""
    return name == path or name.startswith(f"{path}/")


@functools.cache
def _folders() -> dict[str, list[str]]:
    """What the folders of tests in :data:`LANES` follow."""
    if not LANES.exists():
        return {}
    read = tomllib.loads(LANES.read_text())
    return {each["tests"]: [*each["follows"], *read["everywhere"]] for each in read["folder"]}


def night_commit() -> str:
    """The commit of :data:`RECORD`; "" where no night is recorded."""
    return str(json.loads(RECORD.read_text())["commit"]) if RECORD.exists() else ""


@functools.cache
def changed(commit: str) -> frozenset[str] | None:
    """Files that differ from ``commit``, uncommitted ones included. None where git or the history does not know it."""
    try:
        differing = _git("diff", "--name-only", commit, "--") if commit else None
        added = _git("ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if differing is None else frozenset(differing + added)


def _git(*words: str) -> list[str]:
    run = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notes the CPU time at which the test began, for :func:`pytest_runtest_makereport`."""
    item.stash[_BEGAN] = _cpu_s()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Adds the CPU seconds of the test to its last report: those of this process and of children that have ended."""
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", round(_cpu_s() - item.stash[_BEGAN], 3)))


_BEGAN = pytest.StashKey[float]()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _Results:
    """Writes what the reports of all worker processes say, a line for each test."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen = self._tests.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        seen["seconds"] = round(seen["seconds"] + report.duration, 3)
        if report.failed:
            seen["outcome"] = "failed"
        elif report.skipped:
            seen |= {"outcome": "skipped", "reason": _reason(report)}
        if report.when == "teardown":
            seen |= dict(report.user_properties)
            print(json.dumps(self._tests.pop(report.nodeid)), file=self._file, flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that is skipped whole is a line as well."""
        if report.skipped:
            line = {"test": report.nodeid, "outcome": "skipped", "seconds": 0.0, "reason": _reason(report)}
            print(json.dumps(line), file=self._file, flush=True)

    def pytest_unconfigure(self) -> None:
        self._file.close()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    place = report.longrepr
    return place[2].removeprefix("Skipped: ") if isinstance(place, tuple) else str(place)
