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
import hashlib
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
"""The last run of all tests that was green: its commit, what its tests followed, and figures by room."""

LANES = ROOT / "tests/lanes.toml"


def add_options(parser: pytest.Parser) -> None:
    """For ``pytest_addoption`` of a conftest, which pytest reads before it registers this module."""
    group = parser.getgroup("lanes")
    group.addoption("--lane", choices=("all", "commit"), default="all", help="commit: without tests marked night")
    group.addoption("--results", type=Path, help="write a JSON line for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("results")) is not None and not _worker(config):
        config.pluginmanager.register(_Results(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which paths have changed, and so why a commit's run was long; pytest shows no header with -q."""
    if config.getoption("lane") == "commit":
        recorded = followed_at_night()
        changed = [path for path in sorted(recorded) if recorded[path] != digest(path)]
        terminalreporter.line(
            f"lane: {len(changed)} of {len(recorded)} paths changed since the night {' '.join(changed)}".rstrip()
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("lane") == "all":
        if (results := config.getoption("results")) is not None and _worker(config) in ("", "gw0"):
            paths = sorted({path for item in items for path in followed(item)})
            results.parent.mkdir(parents=True, exist_ok=True)
            results.with_suffix(".followed").write_text(json.dumps({path: digest(path) for path in paths}))
        return
    recorded = followed_at_night()
    taken: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        paths = followed(item)
        of_the_night = bool(paths) and all(recorded.get(path) == digest(path) for path in paths)
        (left_out if of_the_night else taken).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = taken


def _worker(config: pytest.Config) -> str:
    """The name of the process among those of one run; "" where there is only one."""
    return str(getattr(config, "workerinput", {}).get("workerid", ""))


def followed(item: pytest.Item) -> list[str]:
    """Paths, from the root, whose changes bring a test of the night back; none for a test of every run."""
    file = str(item.path.relative_to(ROOT))
    paths = [path for mark in item.iter_markers("night") for path in (file, *mark.args)]
    return paths + [path for folder, of in _folders().items() if below(file, folder) for path in (folder, *of)]


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


def followed_at_night() -> dict[str, str]:
    """Paths and what :func:`digest` gave for them in the run of :data:`RECORD`; empty where none is recorded."""
    return dict(json.loads(RECORD.read_text()).get("followed", {})) if RECORD.exists() else {}


@functools.cache
def digest(path: str) -> str:
    """A hash of the names and contents of the files at or under ``path``, but for what git ignores.

    It needs no history, so it is the same in a clone of one commit and in a copy without git.
    """
    hashed = hashlib.sha256()
    for name in _files():
        if below(name, path) and (ROOT / name).is_file():
            hashed.update(f"{name}\0".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return hashed.hexdigest()[:16]


@functools.cache
def _files() -> list[str]:
    """All files of the repository, sorted."""
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(words, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        found = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
        return sorted(name for name in found if "__pycache__" not in name)
    return sorted(set(run.stdout.splitlines()))


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
