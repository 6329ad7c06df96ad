"""Training: the same data at the same step, resumption without a trace, and what a user is told when it cannot be."""

from __future__ import annotations

import csv
import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.pocket_runs import make_work

from pocket_moe import checkpoint, export
from pocket_moe import run as runs
from pocket_moe.batches import Batches, BatchSettings
from pocket_moe.checkpoint import load_weights
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
    says("too little memory for 4 rows", "--rows")


def test_missing_shards_are_an_error(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--work", str(tmp_path), "--run", "x", "--smoke"]) == 1
    assert "data.py" in capsys.readouterr().err
