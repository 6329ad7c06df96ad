"""Training: what a run leaves behind, and what its user reads when it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from testkit.pocket.evidence import make_evidence
from testkit.pocket.training import before_step, curve

from pocket_moe.config import POCKET
from pocket_moe.corpus.batches import BatchSettings
from pocket_moe.corpus.shards import Shards, tokenizer_sha256
from pocket_moe.errors import PocketError
from pocket_moe.measure.heldout import Heldout
from pocket_moe.model import export
from pocket_moe.train import checkpoint
from pocket_moe.train import run as runs
from pocket_moe.train.checkpoint import load_weights

CPU = torch.device("cpu")


def test_smoke_learns_logs_and_exports_what_another_run_goes_on_from(train: Callable[..., int], work: Path) -> None:
    assert train("smoke") == 0
    lines = curve(work, "smoke")
    assert [line["step"] for line in lines] == ["5", "10", "15", "20"]
    assert float(lines[-1]["loss"]) < float(lines[0]["loss"]) - 0.4
    assert float(lines[-1]["heldout_verse"]) < float(lines[1]["heldout_verse"]) < 4
    assert lines[0]["heldout"] == ""
    model, weights = export.load(work / "runs/smoke/model"), load_weights(work / "runs/smoke")
    heldout = Heldout(Shards(work / "shards", "heldout"), CPU, tokens_per_domain=512, length=64, pad_id=3, rows=4)
    exact = heldout.mean(heldout.evaluate(weights))
    assert exact == pytest.approx(float(lines[-1]["heldout"]), abs=1e-4)
    assert heldout.mean(heldout.evaluate(model)) == pytest.approx(exact, abs=0.02)
    start = "--start", str(work / "runs/smoke/model")
    assert train("second", *start) == 0
    assert float(curve(work, "second")[0]["loss"]) < float(lines[-1]["loss"])
    assert train("third", "--kind", "dense", *start) == 1


def test_options_win_over_those_of_smoke(train: Callable[..., int], work: Path) -> None:
    assert train("run", "--steps", "6", "--log-every", "3", "--rows", "2", "--eval-every=100") == 0
    lines = curve(work, "run")
    assert [(line["step"], line["tokens"]) for line in lines] == [("3", "384"), ("6", "768")]
    assert lines[0]["heldout"] == "", "at the end alone"


def test_a_small_checkpoint_is_close_and_in_pieces(
    train: Callable[..., int], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 40_000)
    assert train("whole", "--keep", "both") == 0
    folder = work / "runs/whole/small"
    assert all(file.stat().st_size < 45_000 for file in folder.iterdir())
    assert len(list(folder.glob("weights-*-of-*.safetensors"))) > 3
    exact = load_weights(work / "runs/whole").state_dict()
    moments = torch.load(work / "runs/whole/checkpoint.pt", weights_only=True)["trainer"]["moments"]
    (work / "runs/whole/checkpoint.pt").unlink()
    small = checkpoint._read(work / "runs/whole")["trainer"]
    for name, value in exact.items():
        assert torch.equal(small["model"][name], value)
        kept, held = small["moments"][name]["exp_avg_sq"].sqrt(), moments[name]["exp_avg_sq"].sqrt()
        assert ((kept > 0) | (held.amax(-1, keepdim=True) == 0)).all()
        floor = held.amax(-1, keepdim=True) / checkpoint._E4M3_MAX * 2**-6
        assert ((kept - held).abs() <= held / 15 + floor).all()
    (folder / "weights-0-of-9.safetensors").unlink(missing_ok=True)
    next(folder.glob("weights-1-*")).unlink()
    with pytest.raises(PocketError, match="cannot be read"):
        load_weights(work / "runs/whole")


def test_roots_in_eight_bits_never_become_zero() -> None:
    root = torch.tensor([[1.0, 1e-3, 1e-9], [0.0, 0.0, 0.0]])
    packed = dict(checkpoint._pack("w", root))
    back = checkpoint._unpack("w", packed)
    assert back[0, 0] == 1
    assert (back[0] > 0).all()
    assert not back[1].any()


def test_a_run_goes_on_from_a_small_checkpoint(train: Callable[..., int], work: Path) -> None:
    assert train("run", "--keep", "small") == 0
    assert not (work / "runs/run/checkpoint.pt").exists()
    assert train("run", "--resume", "--keep", "small") == 0
    assert train("run", "--export-only") == 0


def test_the_user_reads_what_does_not_fit(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(*words: str) -> None:
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert all(word in text for word in words), text

    assert train("x", "--work", str(work / "nowhere")) == 1
    says("data.py")
    assert train("none", "--resume") == 1
    says("There is no checkpoint", "without --resume")
    assert train("wide", "--device", "cpu", smoke=False) == 1
    says("64 tokens", "data.py")
    assert train("run") == 0
    capsys.readouterr()
    assert train("run") == 1
    says("--resume")
    assert train("run", "--resume", "--seed", "7") == 1
    says("its seed is 0, not 7")
    assert train("run", "--resume", "--kind", "dense") == 1
    says("model_type")
    (work / "runs/run/checkpoint.pt").write_bytes(b"half")
    assert train("run", "--resume") == 1
    says("cannot be read")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runs.Trainer, "step", full)
    assert train("large") == 1
    says("too little memory for 4 rows of 64 tokens", "--resume with a smaller --chunk-rows", "new --run", "--rows")


@pytest.mark.parametrize("part", ["_model", "_heldout", "Trainer", "Batches", "export_run"])
def test_memory_may_run_out_anywhere(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runs, part, full)
    assert train("run") == 1
    assert capsys.readouterr().err.startswith("error: The GPU has too little memory")


def test_weights_never_go_with_another_tokenizer(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_evidence(work.parent / "other")
    work = work.parent / "other"
    assert train("first", "--work", str(work), "--length", "64") == 0
    file, model = work / "tokenizer/tokenizer.json", work / "runs/first/model"
    exported = (model / "tokenizer.json").read_bytes()
    values = json.loads(file.read_text())
    merges = values["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    file.write_text(json.dumps(values))
    capsys.readouterr()
    assert train("first", "--work", str(work), "--export-only") == 1
    assert "another one than the weights were trained with" in capsys.readouterr().err
    assert (model / "tokenizer.json").read_bytes() == exported
    meta = json.loads((work / "shards/meta.json").read_text())
    meta["tokenizer_sha256"] = tokenizer_sha256(file)
    (work / "shards/meta.json").write_text(json.dumps(meta))
    assert train("second", "--work", str(work), "--start", str(model)) == 1
    assert "another one than the weights were trained with" in capsys.readouterr().err
    assert not (work / "runs/second/checkpoint.pt").exists()


@pytest.mark.parametrize("at", [12, 16])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_its_checkpoint(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    def corrupt(trainer: runs.Trainer) -> None:
        if trainer.steps == at:
            with torch.no_grad():
                trainer.model.norm.fill_(float("nan"))

    before_step(monkeypatch, corrupt)
    assert train("run", "--save-every", "6") == 1
    kept = 6 * (at // 6)
    said = capsys.readouterr().err
    assert f"step {15 if at == 12 else 18}" in said
    assert f"smaller --lr; the checkpoint of step {kept} is kept" in said
    assert torch.load(work / "runs/run/checkpoint.pt", weights_only=True)["trainer"]["step"] == kept
    assert all(p.isfinite().all() for p in load_weights(work / "runs/run").parameters())


def test_training_uses_every_position_of_the_model(script: ModuleType) -> None:
    args = script._parser().parse_args(["--run", "x"])
    assert args.length == BatchSettings().length == POCKET.max_position_embeddings
    assert args.rows == BatchSettings().rows
