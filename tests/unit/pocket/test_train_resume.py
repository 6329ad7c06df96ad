"""Runs in parts: they end as the whole would, with its curve, and only if they are asked for the same training."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from testkit.pocket.training import before_step, curve, stop_at

from pocket_moe.train import checkpoint
from pocket_moe.train import run as runs
from pocket_moe.train.checkpoint import load_weights

DENSE = ("--kind", "dense", "--dropout", "0.2", "--average", "0.9")


def crash_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    def act(trainer: runs.Trainer) -> None:
        if trainer.steps == steps:
            raise RuntimeError("power cut")

    before_step(patch, act)


@pytest.mark.parametrize("extra", [(), DENSE], ids=["moe", "dense"])
def test_an_interrupted_run_goes_on_bit_for_bit(
    train: Callable[..., int], work: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    """No step is lost between two lines: a run that was stopped has one more, and the mean over both is what the whole
    run's line says."""
    options = ("--eval-every", "12", *extra)
    assert train("whole", *options) == 0
    stop_at(monkeypatch, 13)
    assert train("parts", *options) == 0
    assert not (work / "runs/parts/model").exists()
    assert train("parts", "--resume", *options) == 0
    weights = (load_weights(work / "runs" / name).state_dict() for name in ("whole", "parts"))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    whole, parts = curve(work, "whole"), curve(work, "parts")
    assert [line["step"] for line in parts] == ["5", "10", "13", "15", "20"]
    for column in ("loss", "balance", "peak", "gradient_norm"):
        mean = (3 * float(parts[2][column]) + 2 * float(parts[3][column])) / 5
        assert mean == pytest.approx(float(whole[2][column]), rel=1e-5)
    assert [bool(line["heldout"]) for line in parts] == [False, False, True, False, True]
    assert [parts[0], parts[1], parts[4]] == [whole[0], whole[1], whole[3]]


@pytest.mark.parametrize(
    ("options", "seen"),
    [((), ["5", "10", "15"]), (("--save-every", "12"), ["5", "10", "12", "15"])],
    ids=["before any checkpoint", "after a checkpoint between two lines, which has one of its own"],
)
def test_a_crash_loses_no_step_of_a_line(
    train: Callable[..., int], work: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], seen: list[str]
) -> None:
    """Lines after the checkpoint are dropped, and the next is counted from its own."""
    assert train("whole", *options) == 0
    with monkeypatch.context() as patch:
        crash_after(patch, 17)
        with pytest.raises(RuntimeError, match="power cut"):
            train("parts", *options)
    assert [line["step"] for line in curve(work, "parts")] == seen
    assert train("parts", *options, "--resume") == 0
    assert curve(work, "parts") == curve(work, "whole")


def test_speed_counts_steps_alone(train: Callable[..., int], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a step takes 2 s, a checkpoint 100 s and an evaluation 1000 s."""
    now = 0.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    evaluate, save = runs.Heldout.evaluate, checkpoint.save_full
    before_step(monkeypatch, lambda _: later(2))
    monkeypatch.setattr(runs.time, "monotonic", lambda: now)
    monkeypatch.setattr(runs.Heldout, "evaluate", lambda *given: (later(1000), evaluate(*given))[1])
    monkeypatch.setattr(checkpoint, "save_full", lambda *given: (later(100), save(*given))[1])
    assert train("run", "--save-every", "3", "--eval-every", "4") == 0
    with (work / "runs/run/loss.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == ["3", "5", "6", "9", "10", "12", "15", "18", "20"]
    assert {line["tokens_per_second"] for line in lines} == {"128"}


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
    "dtype": ("float32", "bfloat16"),
    "warmup": ("4", "2"),
}


def test_a_resumed_run_keeps_its_training_options(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run") == 0
    before = (work / "runs/run/checkpoint.pt").read_bytes()
    capsys.readouterr()
    assert train("run", "--resume", *(word for name, (_, new) in CHANGED.items() for word in (f"--{name}", new))) == 1
    said = capsys.readouterr().err
    for name, (old, new) in CHANGED.items():
        assert f"its {name} is {old}, not {new}" in said
    assert (work / "runs/run/checkpoint.pt").read_bytes() == before
    assert train("run", "--resume", "--chunk-rows", "50", "--product", "parallel_linear") == 0


def test_steps_may_grow_while_the_rate_is_stable(
    train: Callable[..., int], work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, last, schedule in (("stable", 16, "wsd"), ("decaying", 17, "wsd"), ("cosine", 16, "cosine")):
        with monkeypatch.context() as patch:
            stop_at(patch, last)
            assert train(name, "--schedule", schedule) == 0
    assert train("whole", "--steps", "30") == 0
    capsys.readouterr()
    assert train("decaying", "--resume", "--steps", "30") == 1
    assert "end after 20 steps, not 30, and is at step 17" in capsys.readouterr().err
    assert train("cosine", "--resume", "--schedule", "cosine", "--steps", "30") == 1
    assert "a wsd schedule is stable" in capsys.readouterr().err
    assert train("stable", "--resume", "--steps", "30") == 0
    whole, grown = (load_weights(work / "runs" / name).state_dict() for name in ("whole", "stable"))
    assert all(torch.equal(whole[name], grown[name]) for name in whole)
    assert train("decaying", "--resume", "--steps", "18") == 1
    assert train("decaying", "--resume", "--steps", "18", "--clip", "3") == 1
    assert "its steps is 20, not 18; its clip is 1.0, not 3.0" in capsys.readouterr().err
