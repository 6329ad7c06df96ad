"""Lanes: what is left out of a commit's run, and what changes bring back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from testkit import lanes

pytest_plugins = ["pytester"]

CONFTEST = f"""
import sys
sys.path.insert(0, {str(lanes.ROOT / "tests")!r})
import testkit.lanes as lanes
from pathlib import Path
lanes.ROOT = Path(__file__).parent
lanes.RECORD, lanes.LANES = lanes.ROOT / "night.json", lanes.ROOT / "lanes.toml"

def pytest_addoption(parser): lanes.add_options(parser)
def pytest_configure(config): config.pluginmanager.register(lanes)
"""
JUDGE = (
    CONFTEST.partition("def pytest_addoption")[0]
    + """
import json
from testkit import results
results.ROOT, results.RECORD = lanes.ROOT, lanes.RECORD
tests = [json.loads(line) for line in open("r.jsonl")]
refused = results.Expected(reason="not here", runs=("all",), when="always", why="", count=1)
passed = results.passed([json.load(open("r.units"))], tests, [refused])
lanes.RECORD.write_text(json.dumps({"passed": passed}))
"""
)
TESTS = """
import pytest

import kernels.table.read

def test_each_time(): pass
def test_with_the_table(): pass

@pytest.mark.parametrize("at", [0, 1])
def test_of(at): pass

@pytest.mark.night
def test_at_night(): pass

def test_refuses(): pytest.skip("not here")
"""
MARKED = """
import pytest

@pytest.mark.night("kernels/plan", "card.md")
def test_with_the_plan(): pass
"""
TABLE = """
everywhere = ["constraints.txt"]
each_run = ["test_all.py::test_each_time", "test_all.py::test_of[1]", "often"]
product = ["services/wire.py"]
[follows]
"test_slow.py" = ["kernels/plan", "services/gateway"]
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one file of tests, whose night is recorded."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_all=TESTS)
    pytester.makeini("[pytest]\nmarkers = night: at night")
    git(pytester.path, "init", "--quiet")
    for name, text in {
        "test_plan.py": MARKED,
        "kernels/plan/kernel.py": "",
        "kernels/table/read.py": "",
        "kernels/table/table.lua": "",
        "services/wire.py": "",
        "often/test_often.py": "def test_often(): pass",
        "test_slow.py": "import kernels.table.read, pathlib\npathlib.Path('imported').touch()\ndef test_slow(): pass",
        "constraints.txt": "torch==2",
        ".gitignore": "__pycache__",
        "lanes.toml": TABLE,
    }.items():
        (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
        (pytester.path / name).write_text(text)
    git(pytester.path, "add", "--all")
    git(pytester.path, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "all")
    record(pytester)
    return pytester.path


def git(at: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def record(pytester: pytest.Pytester, *words: str, lane: str = "all") -> set[str]:
    """Run, and record what has passed."""
    found = ran(pytester, f"--lane={lane}", *words)
    (pytester.path / "judge.py").write_text(JUDGE)
    subprocess.run([sys.executable, "judge.py"], cwd=pytester.path, check=True)
    return found


def ran(pytester: pytest.Pytester, *words: str) -> set[str]:
    """Run in a process of its own and return the tests that were taken."""
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--results=r.jsonl", *words)
    lines = map(json.loads, (pytester.path / "r.jsonl").read_text().splitlines())
    return {line["test"].partition("::test_")[2] for line in lines}


def test_a_test_of_each_run_that_is_gone_is_an_error(project: Path, pytester: pytest.Pytester) -> None:
    """Beside others of its file; where the command line names single tests, those alone are collected."""
    (project / "lanes.toml").write_text(TABLE.replace("test_of[1]", "test_of[2]"))
    assert ran(pytester, "--lane=all") == set()
    assert ran(pytester, "--lane=all", "test_all.py::test_each_time") == {"each_time"}


EACH_RUN = {"each_time", "of[1]", "often"}
BY_IMPORT = {"with_the_table", "of[0]", "refuses"}
ALL = EACH_RUN | BY_IMPORT | {"at_night", "with_the_plan", "slow"}


@pytest.mark.parametrize(
    ("changed", "brings_back"),
    [
        ("kernels/plan_b.py", set()),
        ("kernels/plan/kernel.py", {"with_the_plan", "slow"}),
        ("kernels/plan/new.json", {"with_the_plan", "slow"}),
        ("kernels/table/read.py", BY_IMPORT),
        ("kernels/table/table.lua", BY_IMPORT),
        ("services/wire.py", {"slow"}),
        ("test_slow.py", {"slow"}),
        ("constraints.txt", ALL),
    ],
)
def test_a_commit_runs_what_a_change_can_have_turned_red(
    changed: str, brings_back: set[str], project: Path, pytester: pytest.Pytester
) -> None:
    with (project / changed).open("a") as file:
        file.write("\n")
    assert ran(pytester, "--lane=commit") == EACH_RUN | brings_back


def test_all_of_a_file_runs_when_it_has_changed(project: Path, pytester: pytest.Pytester) -> None:
    assert ran(pytester) == ran(pytester, "--lane=all") == ALL
    (project / "test_all.py").write_text(TESTS + "# changed")
    assert ran(pytester, "--lane=commit") == ALL - {"slow", "with_the_plan"}


def test_files_of_which_no_test_is_taken_are_not_imported(project: Path, pytester: pytest.Pytester) -> None:
    (project / "imported").unlink()
    ran(pytester, "--lane=commit")
    assert not (project / "imported").exists()


def test_what_is_gone_has_changed(project: Path, pytester: pytest.Pytester) -> None:
    (project / "kernels/plan/kernel.py").unlink()
    assert ran(pytester, "--lane=commit") == EACH_RUN | {"with_the_plan", "slow"}


@pytest.mark.parametrize("recorded", ["", json.dumps({"commit": "0123456789"})], ids=["none", "of an earlier form"])
def test_without_a_known_night_everything_runs(recorded: str, project: Path, pytester: pytest.Pytester) -> None:
    (project / "night.json").write_text(recorded) if recorded else (project / "night.json").unlink()
    assert ran(pytester, "--lane=commit") == ALL


def test_a_copy_without_git_runs_the_same(project: Path, pytester: pytest.Pytester) -> None:
    shutil.rmtree(project / ".git")
    assert ran(pytester, "--lane=commit") == EACH_RUN
    (project / "kernels/plan/kernel.py").write_text("changed")
    assert ran(pytester, "--lane=commit") == EACH_RUN | {"with_the_plan", "slow"}


@pytest.mark.parametrize(
    ("changed", "words", "left"),
    [
        ("kernels/plan/kernel.py", ["-k", "slow"], {"with_the_plan"}),
        ("kernels/plan/kernel.py", ["-k", "not slow"], {"slow"}),
        ("kernels/plan/kernel.py", ["--lane=commit"], set()),
        ("kernels/table/read.py", ["test_all.py::test_refuses", "test_all.py::test_with_the_table"], BY_IMPORT),
        ("kernels/table/read.py", ["test_plan.py", "test_slow.py"], BY_IMPORT),
        ("kernels/table/read.py", ["-k", "with_the_table"], BY_IMPORT),
        ("kernels/table/read.py", ["test_all.py"], set()),
        ("constraints.txt", ["--lane=commit"], set()),
    ],
)
def test_what_did_not_run_is_not_recorded(
    changed: str, words: list[str], left: set[str], project: Path, pytester: pytest.Pytester
) -> None:
    (project / changed).write_text("# changed")
    record(pytester, *words)
    assert ran(pytester, "--lane=commit") == EACH_RUN | left


@pytest.mark.parametrize(
    "fault",
    ["assert False", "os._exit(0)", "READ.write_text('# another')", "pytest.skip('never heard of')"],
    ids=["red", "dead", "changes what is run", "skipped"],
)
@pytest.mark.parametrize("before", [False, True])
def test_what_did_not_pass_is_not_recorded(
    fault: str, before: bool, project: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are the same all the time, whatever becomes of the test; ``before``: it had passed."""
    (project / "test_plan.py").write_text(
        "import os, pathlib, pytest\nREAD = pathlib.Path('kernels/plan/kernel.py')\n"
        f"def test_with_the_plan():\n    if 'FAULT' in os.environ: {fault}"
    )
    if before:
        record(pytester, "test_plan.py")
    monkeypatch.setenv("FAULT", "1")
    record(pytester, "test_plan.py")
    monkeypatch.delenv("FAULT")
    (project / "kernels/plan/kernel.py").write_text("")
    known = before and fault != "assert False"
    assert ("with_the_plan" in ran(pytester, "--lane=commit")) is not known
    record(pytester, "test_plan.py")
    assert ran(pytester, "--lane=commit") == EACH_RUN


def test_a_failure_stays_one_whatever_follows(project: Path, pytester: pytest.Pytester) -> None:
    (project / "test_slow.py").write_text(
        "import pytest\n@pytest.fixture\ndef late():\n    yield\n    pytest.skip('late')\n"
        "def test_slow(late): assert False"
    )
    (project / "test_plan.py").write_text("import nowhere")
    ran(pytester, "--continue-on-collection-errors")
    lines = map(json.loads, (project / "r.jsonl").read_text().splitlines())
    outcomes = {line["test"]: line["outcome"] for line in lines}
    assert outcomes["test_slow.py::test_slow"] == outcomes["test_plan.py"] == "failed"


def test_results_say_what_was_skipped_and_what_it_cost(project: Path, pytester: pytest.Pytester) -> None:
    ran(pytester)
    lines = {line["test"]: line for line in map(json.loads, (project / "r.jsonl").read_text().splitlines())}
    assert lines["test_all.py::test_refuses"]["reason"] == "not here"
    assert {line["outcome"] for line in lines.values()} == {"passed", "skipped"}
    assert all(line["cpu_s"] >= 0 for line in lines.values())


def test_the_paths_that_tests_follow_exist() -> None:
    """A path that a room has left never changes, and a test that has another name is not listed."""
    read = tomllib.loads(lanes.LANES.read_text())
    paths = [
        *read["everywhere"],
        *read["product"],
        *read["follows"],
        *(path for paths in read["follows"].values() for path in paths),
    ]
    for file in (lanes.ROOT / "tests").rglob("test_*.py"):
        for arguments in re.findall(r"mark\.night\(([^)]*)\)", file.read_text()):
            paths += re.findall(r'"([^"\\]+)"', arguments)
    for each in read["each_run"]:
        file, _, test = each.partition("::")
        paths.append(file)
        assert not test or f"def {test.partition('[')[0]}(" in (lanes.ROOT / file).read_text()
    made_up = {"kernels/plan", "card.md"}
    assert [path for path in paths if path not in made_up and not (lanes.ROOT / path).exists()] == []
