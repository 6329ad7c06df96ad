"""The measurement of sleep and wake runs as its module says, here with a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.models.checkpoints import save_checkpoint

from perf.server import sleep_speed
from services.model.load_spec import load_spec


def test_it_measures_a_checkpoint_that_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(save_checkpoint(tmp_path / "small", "qwen2_moe"))

    def write(folder: Path, _spec: object) -> None:
        (tmp_path / "small").rename(folder)
        (folder / "config.json").unlink()

    monkeypatch.setattr(sleep_speed, "olmoe", lambda: spec)
    monkeypatch.setattr(sleep_speed, "write_checkpoint", write)
    monkeypatch.setattr(sleep_speed, "LEAST_FREED", -1.0)  # weights so small stay
    report = tmp_path / "report.json"
    words = f"--dir {tmp_path} --layers 99 --dtype float32 --kv-memory-gib 0.01 --rounds 1 --json {report}"
    monkeypatch.setattr("sys.argv", ["sleep_speed", *words.split()])
    assert sleep_speed.main() == 0
    assert set(json.loads(report.read_text())["levels"]) == {"1", "2"}
