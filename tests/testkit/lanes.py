"""Which tests a run takes, and how long each of them took.

``--lane all``, which is also what a plain ``pytest`` does, takes every test. ``--lane commit`` leaves out those that
passed before (:data:`RECORD`) with the same contents of all that they follow. What a test follows is found by
:mod:`testkit.follows`, unless the test is slow and says it itself::

    @pytest.mark.night  # its own file
    @pytest.mark.night("services/gateway", "services/queue")  # and what is at or under these paths

tests/lanes.toml says what tests of the whole product follow, and which tests are in every run. ``--results=FILE``
writes a JSON line for each test, and next to it, as FILE with the suffix .units, what was taken and what it followed;
:mod:`testkit.results` reads both.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from testkit.follows import Sources

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/night.json"
"""What has passed: for each file of tests, and each set of paths that marks in it name, a digest of all that it
followed when all of its tests passed. Besides, the last recorded commit, and figures by room of the last whole run."""

LANES = ROOT / "tests/lanes.toml"
SHOWN = 12
"""Names of files that the summary shows."""
IMPORTS = "imports"
"""The unit of the tests of a file that have no mark: they follow what the file imports and names."""


def add_options(parser: pytest.Parser) -> None:
    """For ``pytest_addoption`` of a conftest, which pytest reads before it registers this module."""
    group = parser.getgroup("lanes")
    group.addoption(
        "--lane", choices=("all", "commit"), default="all", help="commit: what a change can have turned red"
    )
    group.addoption("--results", type=Path, help="write a JSON line for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("results") is not None or config.getoption("lane") == "commit":
        files()  # before anything is imported: what is recorded is what was run, or is found to have changed meanwhile
    if (path := config.getoption("results")) is not None and not _worker(config):
        config.pluginmanager.register(_Results(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says for which files a commit's run was long; pytest shows no header with -q."""
    if config.getoption("lane") == "commit":
        ignored = [os.path.relpath(path, ROOT) for path in config.getoption("ignore") or ()]
        names = [name for name in _test_files() if not _has_passed(name) and not any(below(name, at) for at in ignored)]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        said = f"lane: {len(names)} files of tests follow something that has changed since they passed"
        terminalreporter.line(f"{said}: {' '.join(names[:SHOWN])}{more}" if names else said)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files out of which no test will be taken, before they are imported: that takes half a minute."""
    if config.getoption("lane") == "all" or not collection_path.match("test_*.py"):
        return None
    file = str(collection_path.relative_to(ROOT))
    listed = any(each.partition("::")[0] == file or below(file, each) for each in _lanes()["each_run"])
    return None if listed or not _has_passed(file) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests out, and notes the others by unit, also those that -k, -m or -x keep from running."""
    whole = config.getoption("lane") == "all"
    taken = [item for item in items if whole or is_of_each_run(item) or not _unit_has_passed(*unit(item))]
    _refuse_missing(items, _parts(config))
    if (results := config.getoption("results")) is not None and _worker(config) in ("", "gw0"):
        results.parent.mkdir(parents=True, exist_ok=True)
        results.with_suffix(".units").write_text(json.dumps(_noted(config, items, taken)))
    if len(taken) < len(items):
        kept = set(taken)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = taken


def _refuse_missing(items: Sequence[pytest.Item], parts: set[str]) -> None:
    """Raise UsageError for a test of each run that its file does not have: renamed, it would just not run any more."""
    ids = {item.nodeid for item in items}
    whole = {unit(item)[0] for item in items} - parts
    listed = [each for each in _lanes()["each_run"] if "::" in each and each.partition("::")[0] in whole]
    if missing := [each for each in listed if each not in ids]:
        raise pytest.UsageError(f"{LANES.name} has tests in each_run that there are not: {', '.join(missing)}")


def _parts(config: pytest.Config) -> set[str]:
    """Tests that the command line names, and files of which it names some."""
    return {word for argument in config.args if "::" in argument for word in (argument, argument.partition("::")[0])}


def _noted(config: pytest.Config, items: Sequence[pytest.Item], taken: Sequence[pytest.Item]) -> dict[str, Any]:
    """Of each unit of the files that were collected whole: its digest, and the tests of it if all are to run."""
    units: dict[str, dict[str, Any]] = {}
    parts, kept = _parts(config), set(taken)
    for item in items:
        file, key = unit(item)
        if not any(below(file, part) for part in parts):
            noted = units.setdefault(file, {}).setdefault(key, {"digest": digest(file, key), "tests": [], "all": True})
            noted["tests"].append(item.nodeid)
            noted["all"] &= item in kept
    for file in units:
        units[file].setdefault(IMPORTS, {"digest": digest(file, IMPORTS), "tests": [], "all": True})
    return units


def _worker(config: pytest.Config) -> str:
    """The name of the process among those of one run; "" where there is only one."""
    return str(getattr(config, "workerinput", {}).get("workerid", ""))


def is_of_each_run(item: pytest.Item) -> bool:
    """Whether the test, its file or a folder around it is listed."""
    return any(item.nodeid == each or below(item.nodeid.partition("::")[0], each) for each in _lanes()["each_run"])


def unit(item: pytest.Item) -> tuple[str, str]:
    """The file of the test, and the paths that its marks name: tests of a file that follow the same are recorded
    together."""
    marks = [mark.args for mark in item.iter_markers("night")]
    return str(item.path.relative_to(ROOT)), " ".join(sorted({"night"}.union(*marks))) if marks else IMPORTS


@functools.cache
def followed(file: str, key: str) -> frozenset[str]:
    """Files and folders, from the root, whose changes can turn a unit's tests red."""
    if key != IMPORTS:
        return frozenset([file, *_lanes()["everywhere"], *key.split()]) - {"night"}
    imported = _sources().followed_by(file)
    if (rooms := _lanes()["follows"].get(file)) is not None:
        imported = frozenset(name for name in imported if name.startswith("tests/"))
    product = _lanes()["product"] if rooms and any(below(room, "services") for room in rooms) else ()
    return imported.union([file, *_lanes()["everywhere"]], rooms or (), product)


@functools.cache
def digest(file: str, key: str) -> str:
    """A hash of the contents of all that a unit follows, and of the kind of Python that runs it."""
    found = {name for path in followed(file, key) for name in _at_or_under(path)}
    lines = [
        f"{sys.version_info[:2]} {sys.platform} {platform.machine()}",
        *(f"{n} {files()[n]}" for n in sorted(found)),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@functools.cache
def _at_or_under(path: str) -> tuple[str, ...]:
    return (path,) if path in files() else tuple(name for name in files() if name.startswith(f"{path}/"))


def _has_passed(file: str) -> bool:
    """Whether all units of the file are recorded with what they follow now."""
    units = _passed().get(file)
    return units is not None and all(_unit_has_passed(file, key) for key in units)


def _unit_has_passed(file: str, key: str) -> bool:
    return _passed().get(file, {}).get(key) == digest(file, key)


@functools.cache
def _passed() -> dict[str, dict[str, str | None]]:
    read = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return dict(read.get("passed", {}))


def _test_files() -> list[str]:
    return [name for name in files() if Path(name).match("test_*.py")]


def below(name: str, path: str) -> bool:
    """Whether ``name`` is the path or under it."""
    return name == path or name.startswith(f"{path}/")


@functools.cache
def _lanes() -> dict[str, Any]:
    read = tomllib.loads(LANES.read_text()) if LANES.exists() else {}
    return {"each_run": [], "everywhere": [], "product": [], "follows": {}} | read


@functools.cache
def _sources() -> Sources:
    return Sources(ROOT, files())


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
        elif report.skipped and seen["outcome"] != "failed":
            seen |= {"outcome": "skipped", "reason": _reason(report)}
        if report.when == "teardown":
            seen |= dict(report.user_properties)
            self._write(self._tests.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that is skipped whole, or cannot be imported, is a line as well."""
        if report.skipped:
            self._write({"test": report.nodeid, "outcome": "skipped", "seconds": 0.0, "reason": _reason(report)})
        elif report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0})

    def pytest_unconfigure(self) -> None:
        """A test that did not come to its end, as where its process died, has failed."""
        for seen in self._tests.values():
            self._write(seen | {"outcome": "failed"})
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    place = report.longrepr
    return place[2].removeprefix("Skipped: ") if isinstance(place, tuple) else str(place)
