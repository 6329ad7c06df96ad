"""Lanes: what is left out of a commit's run, and what changes bring back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
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
TESTS = """
import pytest

def test_each_time(): pass

@pytest.mark.night
def test_at_night(): pass

@pytest.mark.night("kernels/plan", "card.md")
def test_with_the_plan(): pass

def test_refuses(): pytest.skip("not here")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one file of tests, whose night is recorded."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_all=TESTS)
    pytester.makeini("[pytest]\nmarkers = night: at night")
    git(pytester.path, "init", "--quiet")
    (pytester.path / "kernels").mkdir()
    (pytester.path / "kernels/plan").mkdir()
    (pytester.path / "kernels/plan/kernel.py").write_text("")
    git(pytester.path, "add", "--all")
    git(pytester.path, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "all")
    record(pytester)
    return pytester.path


def git(at: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def record(pytester: pytest.Pytester) -> None:
    ran(pytester, "--lane=all")
    followed = json.loads((pytester.path / "r.followed").read_text())
    (pytester.path / "night.json").write_text(json.dumps({"followed": followed}))


def ran(pytester: pytest.Pytester, *words: str) -> set[str]:
    """Run in a process of its own and return the tests that were taken."""
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--results=r.jsonl", *words)
    lines = map(json.loads, (pytester.path / "r.jsonl").read_text().splitlines())
    return {line["test"].partition("::test_")[2] for line in lines}


EACH_TIME, WITH_THE_PLAN = {"each_time", "refuses"}, {"with_the_plan"}
ALL = EACH_TIME | WITH_THE_PLAN | {"at_night"}


def test_a_commit_runs_what_is_not_of_the_night_and_what_follows_a_change(
    project: Path, pytester: pytest.Pytester
) -> None:
    assert ran(pytester) == ran(pytester, "--lane=all") == ALL
    assert ran(pytester, "--lane=commit") == EACH_TIME
    (project / "kernels/plan_b.py").write_text("another path")
    assert ran(pytester, "--lane=commit") == EACH_TIME
    (project / "kernels/plan/kernel.py").write_text("changed")
    assert ran(pytester, "--lane=commit") == EACH_TIME | WITH_THE_PLAN
    (project / "test_all.py").write_text(TESTS + "# changed")
    assert ran(pytester, "--lane=commit") == ALL


@pytest.mark.parametrize("recorded", ["", json.dumps({"commit": "0123456789"})], ids=["none", "of an earlier form"])
def test_without_a_known_night_everything_runs(recorded: str, project: Path, pytester: pytest.Pytester) -> None:
    (project / "night.json").write_text(recorded) if recorded else (project / "night.json").unlink()
    assert ran(pytester, "--lane=commit") == ALL


def test_a_copy_without_git_runs_the_same(project: Path, pytester: pytest.Pytester) -> None:
    shutil.rmtree(project / ".git")
    assert ran(pytester, "--lane=commit") == EACH_TIME
    (project / "kernels/plan/kernel.py").write_text("changed")
    assert ran(pytester, "--lane=commit") == EACH_TIME | WITH_THE_PLAN


def test_results_say_what_was_skipped_and_what_it_cost(project: Path, pytester: pytest.Pytester) -> None:
    ran(pytester)
    lines = {line["test"]: line for line in map(json.loads, (project / "r.jsonl").read_text().splitlines())}
    assert lines["test_all.py::test_refuses"]["reason"] == "not here"
    assert {line["outcome"] for line in lines.values()} == {"passed", "skipped"}
    assert all(line["cpu_s"] >= 0 for line in lines.values())


def test_a_folder_follows_what_the_table_says(project: Path, pytester: pytest.Pytester) -> None:
    (project / "lanes.toml").write_text(
        'everywhere = ["constraints.txt"]\n[[folder]]\ntests = "slow"\nfollows = ["kernels"]\n'
    )
    (project / "slow").mkdir()
    (project / "slow/test_slow.py").write_text("def test_slow(): pass\n")
    record(pytester)
    assert ran(pytester, "--lane=commit") == EACH_TIME
    (project / "kernels/new.py").write_text("")
    assert ran(pytester, "--lane=commit") == EACH_TIME | {"slow"}
    (project / "kernels/new.py").unlink()
    (project / "constraints.txt").write_text("torch==3")
    assert ran(pytester, "--lane=commit") == EACH_TIME | {"slow"}


def test_the_paths_that_tests_follow_exist() -> None:
    """A path that a room has left would never change, and what follows it never run."""
    read = tomllib.loads(lanes.LANES.read_text())
    paths = [*read["everywhere"], *(path for each in read["folder"] for path in (each["tests"], *each["follows"]))]
    for file in (lanes.ROOT / "tests").rglob("test_*.py"):
        for arguments in re.findall(r"mark\.night\(([^)]*)\)", file.read_text()):
            paths += re.findall(r'"([^"\\]+)"', arguments)
    made_up = {"kernels/plan", "card.md"}
    assert [path for path in paths if path not in made_up and not (lanes.ROOT / path).exists()] == []
