"""Training: the same data at the same step, resumption without a trace, and what a user is told when it cannot be."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.pocket_evidence import make_evidence
from testkit.pocket_runs import make_work

from pocket_moe import checkpoint, export
from pocket_moe import run as runs
from pocket_moe.batches import Batches, BatchSettings
from pocket_moe.checkpoint import load_weights
from pocket_moe.config import POCKET
from pocket_moe.errors import PocketError
from pocket_moe.heldout import Heldout
from pocket_moe.packing import Pieces, cut, pack, place
from pocket_moe.schedule import Schedule
from pocket_moe.shards import Shards

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
DENSE = ("--kind", "dense", "--dropout", "0.2", "--average", "0.9")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return make_work(tmp_path / "work")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pocket_train", ROOT / "examples/pocket-moe/train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(script: ModuleType, work: Path) -> Callable[..., int]:
    """The command line, with steps of 256 tokens."""

    def run(name: str, *options: str, smoke: bool = True) -> int:
        code: int = script.main(["--work", str(work), "--run", name, *(["--smoke"] if smoke else []), *options])
        return code

    return run


def curve(work: Path, name: str) -> list[dict[str, str]]:
    with (work / "runs" / name / "loss.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(8, 32), st.booleans())
def test_packing_keeps_every_token_once_and_in_its_document(lengths: list[int], row: int, anywhere: bool) -> None:
    length = np.array(lengths)
    first = np.concatenate([[0], np.cumsum(length)[:-1]])
    tokens = np.arange(10, 10 + length.sum()).astype(np.uint16)
    pieces = cut(first, length, row, np.random.default_rng(0) if anywhere else None)
    rows = pack(tokens, pieces, row, pad_id=3)
    real = rows.tokens != 3
    assert sorted(rows.tokens[real].tolist()) == tokens.tolist()
    follows = (rows.positions[:, 1:] != 0) & real[:, 1:]
    assert (rows.tokens[:, 1:] - rows.tokens[:, :-1] == 1)[follows].all()
    assert (rows.positions[:, 1:] - rows.positions[:, :-1] == 1)[rows.positions[:, 1:] != 0].all()
    assert (rows.positions[:, 0] == 0).all()
    assert int(((rows.positions == 0) & real).sum()) == len(pieces.length)


def test_a_piece_goes_where_it_leaves_the_least_room() -> None:
    rows, offsets, count = place(np.array([7, 5, 3, 2, 2]), 10)
    assert rows.tolist() == [0, 1, 0, 1, 1]
    assert offsets.tolist() == [0, 0, 7, 5, 7]
    assert count == 2


def test_long_documents_are_cut_and_no_others() -> None:
    pieces = cut(np.array([0, 1100]), np.array([1100, 300]), 512, None)
    expected = Pieces(first=np.array([0, 512, 1024, 1100]), length=np.array([512, 512, 76, 300]))
    assert pieces.first.tolist() == expected.first.tolist()
    assert pieces.length.tolist() == expected.length.tolist()


def test_a_step_has_the_same_batch_whatever_ran_before(work: Path) -> None:
    shards = Shards(work / "shards", "train")
    settings = BatchSettings(rows=4, length=64, seed=5)
    with Batches(shards, settings, CPU, pad_id=3) as one, Batches(shards, settings, CPU, pad_id=3) as other:
        last = 2 * one.per_epoch + 1
        batches = [one.batch(step).tokens_BL for step in range(last + 1)]
        assert torch.equal(other.batch(last).tokens_BL, batches[last])
        assert torch.equal(other.batch(3).tokens_BL, batches[3])
        assert not torch.equal(batches[0], batches[one.per_epoch])


def test_weights_repeat_a_domain(work: Path) -> None:
    shards = Shards(work / "shards", "train")
    plain, heavy, only = (
        Batches(shards, BatchSettings(rows=4, length=64, weights=weights), CPU, pad_id=3)
        for weights in ({}, {"verse": 3.0}, {"dictionary": 0.0, "verse": 0.5})
    )
    with plain, heavy, only:
        by_domain = shards.meta.tokens_by_domain["train"]
        assert heavy.per_epoch == (by_domain["dictionary"] + 3 * by_domain["verse"]) // 256
        assert only.per_epoch == by_domain["verse"] // 512
        tokens = torch.cat([only.batch(step).tokens_BL.flatten() for step in range(only.per_epoch)])
        inner = (tokens[:-1] > 3) & (tokens[1:] > 3)
        steps = (tokens[1:] - tokens[:-1])[inner] % 60
        assert float((steps == 7).float().mean()) > 0.95, "words of verse are seven apart"


@pytest.mark.parametrize("weights", [{"nowhere": 1.0}, {"verse": -1.0}, {"verse": 0.0, "dictionary": 0.0}])
def test_weights_that_mean_nothing_are_refused(work: Path, weights: dict[str, float]) -> None:
    with pytest.raises(PocketError):
        Batches(Shards(work / "shards", "train"), BatchSettings(weights=weights), CPU, pad_id=3)


@pytest.mark.parametrize(
    ("tokens", "wsd", "cosine"), [(5, 0.5, 0.5), (10, 1, 1), (55, 1, 0.5), (80, 1, None), (90, 0.5, None), (100, 0, 0)]
)
def test_schedules(tokens: int, wsd: float, cosine: float | None) -> None:
    assert Schedule(kind="wsd", peak=1, floor=0, warmup=10, total=100).rate(tokens) == pytest.approx(wsd)
    if cosine is not None:
        assert Schedule(kind="cosine", peak=1, floor=0, warmup=10, total=100).rate(tokens) == pytest.approx(cosine)


def test_smoke_learns_logs_and_exports(train: Callable[..., int], work: Path) -> None:
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


@pytest.mark.parametrize("extra", [(), DENSE], ids=["moe", "dense"])
def test_an_interrupted_run_goes_on_bit_for_bit(
    train: Callable[..., int], work: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    assert train("whole", *extra) == 0
    taken = runs.Trainer.step
    count = 0

    def interrupted(self: runs.Trainer, batch: runs.Batches) -> None:
        nonlocal count
        count += 1
        if count == 13:
            signal.raise_signal(signal.SIGTERM)
        taken(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(runs.Trainer, "step", interrupted)
    assert train("parts", *extra) == 0
    assert [line["step"] for line in curve(work, "parts")] == ["5", "10"]
    assert not (work / "runs/parts/model").exists()
    assert train("parts", "--resume", *extra) == 0
    whole, parts = (load_weights(work / "runs" / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # Lines are means since the last one: that of step 15 lacks the steps before the stop.
    assert curve(work, "whole")[-1] == curve(work, "parts")[-1]


def test_lines_after_the_checkpoint_are_dropped_on_resume(
    train: Callable[..., int], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("whole") == 0
    taken = runs.Trainer.step

    def crash(self: runs.Trainer, batch: runs.Batches) -> None:
        if self.steps == 17:
            raise RuntimeError("power cut")
        taken(self, batch)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(runs.Trainer, "step", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train("parts")
    assert [line["step"] for line in curve(work, "parts")] == ["5", "10", "15"]
    assert train("parts", "--resume") == 0
    assert curve(work, "parts") == curve(work, "whole")


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


def test_training_goes_on_from_exported_weights(train: Callable[..., int], work: Path) -> None:
    assert train("first") == 0
    assert train("second", "--start", str(work / "runs/first/model")) == 0
    assert float(curve(work, "second")[0]["loss"]) < float(curve(work, "first")[-1]["loss"])
    assert train("third", "--kind", "dense", "--start", str(work / "runs/first/model")) == 1


def test_the_user_is_told_what_does_not_fit(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(*words: str) -> None:
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert all(word in text for word in words), text

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


CHANGED = {
    "lr": ("0.002", "0.001"),
    "lr-floor": ("0.1", "0.2"),
    "schedule": ("wsd", "cosine"),
    "decay": ("0.2", "0.3"),
    "weight-decay": ("0.1", "0.0"),
    "clip": ("1.0", "2.0"),
    "dropout": ("0.0", "0.1"),
    "balance": ("0.01", "0.02"),
    "z-loss": ("0.0", "0.001"),
    "average": ("0.0", "0.9"),
}


def test_a_resumed_run_keeps_its_training_options(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str], script: ModuleType
) -> None:
    assert train("run") == 0
    before = (work / "runs/run/checkpoint.pt").read_bytes()
    capsys.readouterr()
    assert train("run", "--resume", *(word for name, (_, new) in CHANGED.items() for word in (f"--{name}", new))) == 1
    said = capsys.readouterr().err
    for name, (old, new) in CHANGED.items():
        assert f"its {name} is {old}, not {new}" in said
    for name, value in (("dtype", "bfloat16"), ("warmup", 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(script.SMOKE, name, value)
            assert train("run", "--resume") == 1
        assert f"its {name} is " in capsys.readouterr().err
    assert (work / "runs/run/checkpoint.pt").read_bytes() == before
    assert train("run", "--resume", "--chunk-rows", "50", "--product", "parallel_linear") == 0


def test_steps_may_grow_while_the_rate_is_stable(
    train: Callable[..., int],
    work: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    script: ModuleType,
) -> None:
    def stopped(name: str, at: int, *options: str) -> None:
        taken = runs.Trainer.step

        def step(self: runs.Trainer, batch: runs.Batches) -> None:
            if self.steps == at - 1:
                signal.raise_signal(signal.SIGTERM)
            taken(self, batch)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(runs.Trainer, "step", step)
            assert train(name, *options) == 0

    stopped("stable", 16)
    stopped("decaying", 17)
    stopped("cosine", 16, "--schedule", "cosine")
    with monkeypatch.context() as patch:
        patch.setitem(script.SMOKE, "steps", 30)
        assert train("whole") == 0
        capsys.readouterr()
        assert train("decaying", "--resume") == 1
        assert "end after 20 steps, not 30, and is at step 17" in capsys.readouterr().err
        assert train("cosine", "--resume", "--schedule", "cosine") == 1
        assert "a wsd schedule is stable" in capsys.readouterr().err
        assert train("stable", "--resume") == 0
    whole, grown = (load_weights(work / "runs" / name).state_dict() for name in ("whole", "stable"))
    assert all(torch.equal(whole[name], grown[name]) for name in whole)
    monkeypatch.setitem(script.SMOKE, "steps", 18)
    assert train("decaying", "--resume") == 1
    assert train("decaying", "--resume", "--clip", "3") == 1
    assert "its steps is 20, not 18; its clip is 1.0, not 3.0" in capsys.readouterr().err


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
    meta["tokenizer_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (work / "shards/meta.json").write_text(json.dumps(meta))
    assert train("second", "--work", str(work), "--start", str(model)) == 1
    assert "another one than the weights were trained with" in capsys.readouterr().err
    assert not (work / "runs/second/checkpoint.pt").exists()


@pytest.mark.parametrize("at", [12, 16])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_its_checkpoint(
    train: Callable[..., int],
    work: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    script: ModuleType,
    at: int,
) -> None:
    taken = runs.Trainer.step

    def step(self: runs.Trainer, batch: runs.Batches) -> None:
        if self.steps == at:
            with torch.no_grad():
                self.model.norm.fill_(float("nan"))
        taken(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(runs.Trainer, "step", step)
    monkeypatch.setitem(script.SMOKE, "save_every", 6)
    assert train("run") == 1
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


def test_missing_shards_are_an_error(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--work", str(tmp_path), "--run", "x", "--smoke"]) == 1
    assert "data.py" in capsys.readouterr().err
