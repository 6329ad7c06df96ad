"""Which tests a run takes, and how long each of them took.

``--lane all``, which is also what a plain ``pytest`` does, takes every test. ``--lane commit`` leaves out those that
nothing can have turned red since the last night that is recorded (:data:`RECORD`): no file that they follow has
changed. What a test follows is found by :mod:`testkit.follows`, unless the test is slow and says it itself::

    @pytest.mark.night  # its own file
    @pytest.mark.night("services/gateway", "services/queue")  # and what is at or under these paths

tests/lanes.toml says what tests of the whole product follow, and which tests are in every run. ``--results=FILE``
writes a JSON line for each test, which :mod:`testkit.results` reads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.follows import Sources

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/night.json"
"""The last run that was green: its commit, the hash of each file, and figures by room."""

LANES = ROOT / "tests/lanes.toml"
SHOWN = 12
"""Names of changed files that the summary shows."""


def add_options(parser: pytest.Parser) -> None:
    """For ``pytest_addoption`` of a conftest, which pytest reads before it registers this module."""
    group = parser.getgroup("lanes")
    group.addoption(
        "--lane", choices=("all", "commit"), default="all", help="commit: what a change can have turned red"
    )
    group.addoption("--results", type=Path, help="write a JSON line for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("results")) is not None and not _worker(config):
        config.pluginmanager.register(_Results(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which files have changed, and so why a commit's run was long; pytest shows no header with -q."""
    if config.getoption("lane") == "commit":
        names = sorted(changed())
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        terminalreporter.line(
            f"lane: {len(names)} files changed since the night {' '.join(names[:SHOWN])}{more}".rstrip()
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files out of which no test will be taken, before they are imported: that takes half a minute."""
    if config.getoption("lane") == "all" or not collection_path.match("test_*.py"):
        return None
    file = str(collection_path.relative_to(ROOT))
    listed = any(each.partition("::")[0] == file or below(file, each) for each in _lanes()["each_run"])
    return None if listed or any(map(has_changed, _followed_by_file(file))) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (results := config.getoption("results")) is not None and _worker(config) in ("", "gw0"):
        results.parent.mkdir(parents=True, exist_ok=True)
        results.with_suffix(".files").write_text(json.dumps(files()))
    if config.getoption("lane") == "all":
        return
    taken: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (taken if is_of_each_run(item) or any(map(has_changed, followed(item))) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = taken


def _worker(config: pytest.Config) -> str:
    """The name of the process among those of one run; "" where there is only one."""
    return str(getattr(config, "workerinput", {}).get("workerid", ""))


def is_of_each_run(item: pytest.Item) -> bool:
    """Whether the test, its file or a folder around it is listed."""
    return any(item.nodeid == each or below(item.nodeid.partition("::")[0], each) for each in _lanes()["each_run"])


def followed(item: pytest.Item) -> frozenset[str]:
    """Files and folders, from the root, whose changes can turn the test red."""
    file = str(item.path.relative_to(ROOT))
    if marks := [mark.args for mark in item.iter_markers("night")]:
        return frozenset([file, *_lanes()["everywhere"]]).union(*marks)
    return _followed_by_file(file)


@functools.cache
def _followed_by_file(file: str) -> frozenset[str]:
    imported = _sources().followed_by(file)
    if (rooms := _lanes()["follows"].get(file)) is not None:
        imported = frozenset(name for name in imported if below(name, "tests"))
    return imported.union([file, *_lanes()["everywhere"]], rooms or ())


def below(name: str, path: str) -> bool:
    """Whether ``name`` is the path or under it."""
    return name == path or name.startswith(f"{path}/")


@functools.cache
def _lanes() -> dict[str, Any]:
    read = tomllib.loads(LANES.read_text()) if LANES.exists() else {}
    return {"each_run": [], "everywhere": [], "follows": {}} | read


@functools.cache
def _sources() -> Sources:
    return Sources(ROOT, files().keys() | changed())  # what is gone is followed, too


@functools.cache
def has_changed(path: str) -> bool:
    """Whether a file at or under the path has been changed, added or removed since the recorded night."""
    return path in changed() or any(below(name, path) for name in changed())


@functools.cache
def changed() -> frozenset[str]:
    """The files that differ from those of the night; where none is recorded, all of them."""
    recorded = json.loads(RECORD.read_text()).get("files", {}) if RECORD.exists() else {}
    now = files()
    return frozenset(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))


@functools.cache
def files() -> dict[str, str]:
    """The files of the repository, sorted, with a hash of each one's content; not those that git ignores.

    Neither needs any history: they are the same in a clone of one commit and in a copy without git.
    """
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        found = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*"))
        names = [name for name in found if not _MADE.search(name)]
    kept = sorted({name for name in names if (ROOT / name).is_file() and ROOT / name != RECORD})
    return {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:12] for name in kept}


_MADE = re.compile(r"(^|/)(\.git|\.venv|\.cache|\.\w+_cache|\.hypothesis|__pycache__|[^/]*\.egg-info)(/|$)")
"""Files that git would ignore, in a copy without git."""


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
