"""Fine-tunes of equal names and sizes have one fingerprint and differ in the hash of their weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from testkit.models.tiny_models import CONFIGS, save_model

from services.errors import CheckpointError
from services.model import weights_sample
from services.model.load_spec import load_spec
from services.model.spec import ModelSpec
from services.model.weights_sample import PIECE_BYTES, with_weights


def sampled(folder: Path) -> ModelSpec:
    return with_weights(load_spec(folder), folder)


def change(folder: Path, part: str, factor: float) -> int:
    """Multiply all tensors whose names have ``part`` in them; returns their number."""
    changed = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        wanted = [name for name in tensors if part in name]
        save_file({**tensors, **{name: tensors[name] * factor for name in wanted}}, file, {"format": "pt"})
        changed += len(wanted)
    return changed


@pytest.mark.parametrize("shards", ["1GB", "20KB"], ids=["file", "shards"])
def test_fine_tunes_of_one_shape_differ(tmp_path: Path, shards: str) -> None:
    save_model(tmp_path, CONFIGS["qwen3"], shard_size=shards)
    first = sampled(tmp_path)
    assert change(tmp_path, "", 1.0) > 0
    assert sampled(tmp_path) == first, "the same weights, in files that were written again"
    seen = {first.weights}
    for part in ("embed_tokens", "layers.1.self_attn.q_proj", "mlp.gate.", "layers.0.mlp.experts.", "norm"):
        assert change(tmp_path, part, 1.5) > 0
        tuned = sampled(tmp_path)
        assert tuned.fingerprint == first.fingerprint
        assert tuned.weights not in seen, part
        seen.add(tuned.weights)


def test_of_many_experts_few_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS["qwen3"], "num_experts": 64}
    save_model(tmp_path, config)
    read: list[int] = []

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, offset)

    pread: Any = os.pread
    monkeypatch.setattr(weights_sample.os, "pread", counting)
    spec = sampled(tmp_path)
    assert len(read) <= 16 * spec.num_layers
    assert max(read) == PIECE_BYTES
    assert sum(read) < (tmp_path / "model.safetensors").stat().st_size / 10


def test_a_damaged_checkpoint_has_no_sample(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["qwen3"])
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CheckpointError):
        sampled(tmp_path)
