"""Digests next to a checkpoint: they fit the served experts and this checkpoint only, and are written without torch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.checkpoints import save_checkpoint
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS
from testkit.models.tiny_models import CONFIGS, save_model
from torch import Tensor

import services.model.digests as digests_module
from services.cli.fetch import MARK, fetch
from services.errors import CheckpointError
from services.fabric.tcp.frames import bytes_of
from services.model.checkpoint import Checkpoint
from services.model.digests import FILE, read_digests, write_digests
from services.model.load_spec import load_spec
from services.model.weights import load_experts

BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'numpy')));"
RUN = "from services.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")
    write_digests(folder)
    return folder


@pytest.mark.parametrize("name", ["qwen3", "qwen3-mixed-layers", "qwen2", "mixtral", "olmoe", "gpt-oss"])
def test_digests_are_of_each_experts_matrices_as_they_are_served(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, CONFIGS[name], shard_size="20KB")
    write_digests(tmp_path)
    spec = load_spec(tmp_path)
    digests = read_digests(tmp_path, spec, "float32")
    assert digests is not None
    loaded = load_experts(tmp_path, spec, dtype=torch.float32, device=torch.device("cpu"))
    assert tuple(loaded) == spec.moe_layers == tuple(digests.layers)
    for layer, held in loaded.items():
        for expert in held.expert_ids:
            for part, matrices in held.tensors().items():
                served = hashlib.sha256(bytes_of(matrices[expert])).digest()
                assert digests.of(layer, part, expert) == served


def test_digests_of_another_type_or_checkpoint_are_none(model: Path, tmp_path: Path) -> None:
    spec = load_spec(model)
    assert read_digests(model, spec, "float32") is not None
    for narrower in ("bfloat16", "float16"):
        assert read_digests(model, spec, narrower) is None
    other = save_checkpoint(tmp_path, "mixtral")
    (other / FILE).write_bytes((model / FILE).read_bytes())
    assert read_digests(other, load_spec(other), "float32") is None


@pytest.mark.parametrize(
    ("stored", "served"), [("bfloat16", ["bfloat16", "float32"]), ("float16", ["float16", "float32"])]
)
def test_digests_are_for_the_type_that_is_stored_and_a_wider_one(
    tmp_path: Path, stored: str, served: list[str]
) -> None:
    save_model(tmp_path, CONFIGS["qwen3"]).to(getattr(torch, stored)).save_pretrained(tmp_path)
    write_digests(tmp_path)
    spec = load_spec(tmp_path)
    fit = [dtype for dtype in ("bfloat16", "float16", "float32") if read_digests(tmp_path, spec, dtype) is not None]
    assert fit == served


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_digests_of_experts_that_are_computed_are_for_their_own_type_alone(tmp_path: Path, name: str) -> None:
    """A wider type has values in between, which are not rounded. gpt-oss's lie in one tensor of all."""
    folder = tmp_path / "plain"
    save_model(folder, CONFIGS[name])
    if name == "qwen3":
        folder = quantise(folder, tmp_path, FORMATS["gptq-int4"]).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    write_digests(folder)
    spec = load_spec(folder)
    fit = [dtype for dtype in ("bfloat16", "float16", "float32") if read_digests(folder, spec, dtype) is not None]
    assert fit == ["bfloat16"]


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    save_model(tmp_path / "plain", CONFIGS["qwen3"])
    return quantise(tmp_path / "plain", tmp_path, FORMATS["fp8-block"]).folder


def test_digests_of_a_quantised_checkpoint_are_of_its_weights_as_they_are_served(quantised: Path) -> None:
    write_digests(quantised)
    spec = load_spec(quantised)
    digests = read_digests(quantised, spec, spec.dtype)
    assert digests is not None
    loaded = load_experts(quantised, spec, dtype=getattr(torch, spec.dtype), device=torch.device("cpu"))
    for layer, held in loaded.items():
        for expert in held.expert_ids:
            for part, matrices in (("gate_up", held.w_gate_up_E2FD), ("down", held.w_down_EDF)):
                assert digests.of(layer, part, expert) == hashlib.sha256(bytes_of(matrices[expert])).digest()


class Noted:
    """Progress that a test looks at; it ends the work after ``most`` parts."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.total, self.done, self._most = 0, 0, most

    def begin(self, what: str, total_bytes: int) -> None:
        del what
        self.total = total_bytes

    def advance(self, nbytes: int) -> None:
        self.done, self._most = self.done + nbytes, self._most - 1
        if not self._most:
            raise KeyboardInterrupt


def test_quantised_weights_are_hashed_by_several_threads(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices are under way together: the first waits for the second."""
    monkeypatch.setattr(digests_module, "hashing_threads", lambda: 2)
    pair, read, before = threading.Barrier(2), Checkpoint.pieces, torch.get_num_threads()

    def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
        assert torch.get_num_threads() == 1, "each thread computes by itself"
        if name.endswith(("up_proj.weight", "down_proj.weight")):
            pair.wait(60)
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "pieces", pieces)
    progress = Noted()
    torch.set_num_threads(2)
    try:
        write_digests(quantised, progress=progress)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert progress.done == progress.total > 0


def test_a_ctrl_c_begins_no_other_matrix(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "hashing_threads", lambda: 1)
    begun: list[str] = []
    read = Checkpoint.pieces

    def pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
        begun.append(name)
        time.sleep(0.01)
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "pieces", pieces)
    with pytest.raises(KeyboardInterrupt):
        write_digests(quantised, progress=Noted(most=1))
    spec = load_spec(quantised)
    assert len(begun) < 3 * spec.num_experts * len(spec.moe_layers) / 2
    assert not (quantised / FILE).exists()


def changed(known: dict[str, Any]) -> list[bytes]:
    short = known | {"layers": {layer: {"gate_up": [], "down": []} for layer in known["layers"]}}
    fewer = known | {"layers": dict(list(known["layers"].items())[1:])}
    return [
        b"",
        b"\xff",
        b"[" * 5000,
        b"{}",
        *(json.dumps(one).encode() for one in (short, fewer, known | {"format": 2})),
    ]


def test_a_file_that_is_not_whole_is_none(model: Path) -> None:
    file, spec = model / FILE, load_spec(model)
    whole = file.read_bytes()
    try:
        for data in [*changed(json.loads(whole)), whole[:-20]]:
            file.write_bytes(data)
            assert read_digests(model, spec, "float32") is None
        file.unlink()
        assert read_digests(model, spec, "float32") is None
    finally:
        file.write_bytes(whole)
    assert read_digests(model, spec, "float32") is not None


def test_a_model_without_experts_or_a_damaged_one_has_none(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=list(range(8)))
    with pytest.raises(CheckpointError, match="has no experts"):
        write_digests(folder)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        write_digests(folder)
    assert not (folder / FILE).exists()


def test_the_command_needs_no_torch(model: Path) -> None:
    before = (model / FILE).read_bytes()
    (model / FILE).unlink()
    words = [sys.executable, "-c", BLOCKED + RUN, "digests", str(model)]
    assert subprocess.run(words, check=False).returncode == 0
    assert (model / FILE).read_bytes() == before


def test_fetch_writes_them_before_the_folder_is_whole(model: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", BLOCKED + RUN, "fetch", str(tmp_path / "to"), "--source", str(model)]
    assert subprocess.run(words, check=False).returncode == 0
    assert (tmp_path / "to" / FILE).read_bytes() == (model / FILE).read_bytes()


def test_a_folder_that_was_fetched_before_gets_them_too(model: Path, tmp_path: Path) -> None:
    fetch(str(model), tmp_path, {})
    (tmp_path / FILE).unlink()
    fetch(str(model), tmp_path, {})
    assert (tmp_path / FILE).read_bytes() == (model / FILE).read_bytes()


def test_those_of_another_source_do_not_stay(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    to, other = tmp_path / "to", tmp_path / "other"
    fetch(str(model), to, {})
    other.mkdir()
    (other / "config.json").write_text("{}")
    fetch(str(other), to, {})
    assert (to / MARK).read_text() == str(other)
    assert not (to / FILE).exists()
    assert "cannot write the digests of the experts' weights" in caplog.text
