"""Filling a folder, and waiting until it is whole."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.processes.hub import hub

from services.cli.fetch import MARK, RECORD, fetch, main, wait
from services.errors import CheckpointError, ConfigError

DIGEST = hashlib.sha256(b"weights").hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_files_are_copied_checked_and_the_folder_marked_last(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "a" / "model"
    assert main([str(to), "--source", str(source), "--sha256", f"model.safetensors={DIGEST}"]) == 0
    assert (to / "model.safetensors").read_bytes() == b"weights"
    assert main([str(to), "--source", str(source), "--wait"]) == 0
    (source / "model.safetensors").write_bytes(b"changed")
    fetch(str(source), to, {"model.safetensors": DIGEST})
    assert (to / "model.safetensors").read_bytes() == b"weights", "what is there is not fetched again"


def test_another_file_than_its_digest_says_leaves_no_mark(source: Path, tmp_path: Path) -> None:
    fetch(str(source), tmp_path / "model", {})
    with pytest.raises(CheckpointError, match="has SHA-256"):
        fetch(str(source), tmp_path / "model", {"model.safetensors": "0" * 64})
    assert not (tmp_path / "model" / MARK).exists()
    with pytest.raises(CheckpointError, match="is missing, but a digest"):
        fetch(str(source), tmp_path / "model", {"other": "0" * 64})


def test_who_waits_for_another_source_waits_on(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fetch(str(source), folder, {"model.safetensors": DIGEST})
    waits: list[float] = []

    def arrive(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (folder / MARK).write_text("hf://another@1")

    wait(folder, "hf://another@1", sleep=arrive)
    assert len(waits) == 3


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text('{"other": 1}')
    (folder / "model-00001.safetensors").write_bytes(b"other weights")
    return folder


def test_nothing_stays_of_another_source(source: Path, other: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (source / "chat_template.jinja").write_text("of the first")
    fetch(str(source), folder, {})
    fetch(str(other), folder, {})
    assert names(folder) == names(other)
    assert (folder / "config.json").read_text() == '{"other": 1}'
    fetch(str(source), folder, {})
    assert names(folder) == names(source)
    (source / "chat_template.jinja").unlink()
    fetch(str(source), folder, {"model.safetensors": DIGEST})
    assert names(folder) == names(source), "what the source has lost goes, too"


def test_nothing_stays_of_a_fetch_that_was_interrupted(
    source: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    (source / "chat_template.jinja").write_text("of the first")

    def one_file_then_none(start: Path, to: Path) -> None:
        if names(folder):
            raise OSError("the disk is full")
        to.write_bytes(start.read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", one_file_then_none)
        with pytest.raises(CheckpointError, match="the disk is full"):
            fetch(str(source), folder, {})
    assert names(folder) == ["chat_template.jinja"]
    fetch(str(other), folder, {})
    assert names(folder) == names(other)


def test_files_that_nobody_fetched_are_not_mixed_in_and_not_removed(source: Path, other: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fetch(str(source), folder, {})
    (folder / "chat_template.jinja").write_text("mine")
    with pytest.raises(CheckpointError, match=r"nor fetched before: chat_template.jinja\. Remove"):
        fetch(str(other), folder, {})
    assert names(folder) == [*["chat_template.jinja"], *names(source)]
    assert (folder / MARK).exists(), "it is still whole"
    (folder / RECORD).unlink()  # as an older release leaves it
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fetch(str(other), folder, {})


@pytest.mark.parametrize(
    "record", ["{", '{"revision": "x", "files": ["../kept"]}', '{"revision": "x", "files": ["/kept"]}']
)
def test_a_record_that_cannot_be_right_removes_nothing(source: Path, tmp_path: Path, record: str) -> None:
    (tmp_path / "kept").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / RECORD).write_text(record)
    with pytest.raises(CheckpointError, match="Empty the folder"):
        fetch(str(source), tmp_path / "model", {})
    assert (tmp_path / "kept").exists()


def test_a_folder_is_not_filled_from_its_own_inside(source: Path) -> None:
    for inside in (source, source / "part"):
        inside.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="is inside"):
            fetch(str(inside), source, {})


def test_files_without_a_digest_are_named(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fetch(str(source), tmp_path / "some", {"model.safetensors": DIGEST})
    assert "no digest was given for 1 of 2 files: config.json" in caplog.text
    caplog.clear()
    both = {"model.safetensors": DIGEST, "config.json": hashlib.sha256(b"{}").hexdigest()}
    fetch(str(source), tmp_path / "all", both)
    assert "digest was given" not in caplog.text
    assert "is not pinned to a commit" not in caplog.text


def test_mistakes_are_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no digest"):
        main([str(tmp_path), "--source", str(source), "--sha256", "model.safetensors=abc"])
    with pytest.raises(CheckpointError, match="There is no folder"):
        main([str(tmp_path), "--source", str(tmp_path / "nowhere")])


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    into = tmp_path / "full/model"
    with pytest.raises(CheckpointError, match=f"Cannot fetch {source} into {into}: .*Not a directory.*writable"):
        main([str(into), "--source", str(source)])


def test_the_hubs_files_at_the_commit_that_a_branch_is_at(source: Path, tmp_path: Path) -> None:
    commit = "0123456789" * 4
    folder = tmp_path / "model"
    files = {"config.json": b'{"hub": 1}', "a/b.txt": b"b", MARK: b"x", ".gitattributes": b"x"}

    def fetched(name: str) -> str:
        command = [sys.executable, "-m", "services", "fetch", str(folder), "--source", name]
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    with hub("org/tiny", commit, files) as url:
        fetch(str(source), folder, {})
        said = fetched("hf://org/tiny@main")
        moves = "is not pinned to a commit, so its contents may change; it is now at"
        assert f"hf://org/tiny@main {moves} {commit}" in said
        assert "no digest was given for 2 of 2 files: a/b.txt, config.json" in said
        assert names(folder) == ["a", "config.json"]
        assert not (folder / ".gitattributes").exists()
        assert (folder / "config.json").read_bytes() == b'{"hub": 1}'
        assert (folder / MARK).read_text() == "hf://org/tiny@main"
        assert "is already there" in fetched("org/tiny@main"), "a bare id means the same"
        assert "is not pinned to a commit" not in fetched(f"org/tiny@{commit}")
    fetch(str(source), folder, {})
    assert names(folder) == ["a", *names(source)]
    assert not list((folder / "a").iterdir())
