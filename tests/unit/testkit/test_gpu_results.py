"""The record of the last runs on GPUs is of files that are still much the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testkit.gpu import results
from testkit.gpu.results import RECORD, ROOT, SETS, GpuSet, Room, UnknownAge, content, problems

HERE = GpuSet(name="gpu1", folders=(), rooms={"code": Room(paths=("code", "one.py"), why="it needs one")})


@pytest.mark.parametrize("name", SETS)
def test_the_record_is_young_enough(name: str) -> None:
    record = json.loads(RECORD.read_text()).get(name) if RECORD.exists() else None
    if record is None:
        pytest.skip(f"no run of the set {name} on a GPU is recorded")
    try:
        found = problems(SETS[name], record)
    except UnknownAge as unknown:
        pytest.skip(str(unknown))
    assert not found, "\n".join(found)


def test_rooms_are_where_they_are_said_to_be() -> None:
    paths = [path for one in SETS.values() for room in one.rooms.values() for path in room.paths]
    assert [path for path in paths if not (ROOT / path).exists()] == []


class Clone:
    """A repository with a room, and a record of its first commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.write("code/a.py", "1")
        self.write("one.py", "1")
        self.commit()
        self.record: dict[str, Any] = {
            "commit": self.git("rev-parse", "HEAD"), "passed": 3, "failed": 0,
            "rooms": {"code": content(HERE.rooms["code"], root)},
        }  # fmt: skip

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "c")

    @property
    def problems(self) -> list[str]:
        return problems(HERE, self.record, self.root)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_it_ages_by_the_commits_that_change_a_room(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results.MAX_COMMITS == 30, "CONTRIBUTING.md says so"
    monkeypatch.setattr(results, "MAX_COMMITS", 2)
    for number, (file, old) in enumerate([("code/a.py", 0), ("b.py", 0), ("one.py", 0), ("b.py", 0), ("code/c", 1)]):
        clone.write(file, f"other {number}")
        clone.commit()
        assert len(clone.problems) == old, file
    assert "3 commits changed code since it last ran on a GPU, at most 2 may: it needs one." in clone.problems[0]
    clone.git("revert", "--no-edit", "HEAD", "HEAD~2", "HEAD~4")
    assert clone.problems == [], "it is as it was"


def test_a_merge_is_no_change_of_its_own(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_COMMITS", 2)
    clone.git("checkout", "-q", "-b", "side")
    clone.write("code/b.py", "1")
    clone.commit()
    clone.git("checkout", "-q", "-")
    clone.write("one.py", "2")
    clone.commit()
    clone.git("merge", "-q", "--no-edit", "side")
    assert clone.problems == []


def test_a_record_of_a_tree_with_changes_is_refused(clone: Clone) -> None:
    clone.write("code/a.py", "not committed")
    clone.record["rooms"] = {"code": content(HERE.rooms["code"], clone.root)}
    clone.git("checkout", "-q", "code/a.py")
    assert "not that of its commit" in clone.problems[0]


def test_failures_and_runs_of_nothing_are_seen(clone: Clone) -> None:
    clone.record |= {"passed": 0, "failed": 2}
    assert clone.problems == ["gpu1: 2 tests failed.", "gpu1: no test passed."]


def test_without_history_the_age_is_unknown(clone: Clone) -> None:
    clone.record["commit"] = "0" * 40
    assert clone.problems == [], "what is the same has no age"
    clone.write("one.py", "2")
    with pytest.raises(UnknownAge, match="git fetch --unshallow"):
        _ = clone.problems


def test_a_run_of_nothing_is_not_recorded(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "testkit.gpu.results", "--commit", "none", "--out", str(out)]
    command += ["--lane=all", "-p", "no:cacheprovider", "-k", "memory"]
    paths = os.pathsep.join(str(ROOT / path) for path in ("", "kernels", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert "nothing ran, so nothing is recorded: {'on a GPU: " in done.stderr, done.stdout
    assert done.returncode != 0
    assert not out.exists()
