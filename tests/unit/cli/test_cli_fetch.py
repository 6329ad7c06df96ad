"""Filling a folder, and waiting until it is whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from services.cli.fetch import MARK, fetch, main, wait
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


def test_what_is_there_is_not_fetched_again(source: Path, tmp_path: Path) -> None:
    fetch(str(source), tmp_path / "model", {})
    (source / "model.safetensors").write_bytes(b"changed")
    fetch(str(source), tmp_path / "model", {})
    assert (tmp_path / "model/model.safetensors").read_bytes() == b"weights"


def test_another_file_than_its_digest_says_leaves_no_mark(source: Path, tmp_path: Path) -> None:
    fetch(str(source), tmp_path / "model", {})
    with pytest.raises(CheckpointError, match="has SHA-256"):
        fetch(str(source), tmp_path / "model", {"model.safetensors": "0" * 64})
    assert not (tmp_path / "model" / MARK).exists()
    with pytest.raises(CheckpointError, match="is not there"):
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
