"""The pocket model's training, watched and disturbed: the lines of its curve, and things that happen during a step."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pocket_moe.corpus.batches import Batch
from pocket_moe.train.loop import Trainer


def curve(work: Path, name: str) -> list[dict[str, str]]:
    """A run's lines without their speed, which no two runs share."""
    with (work / "runs" / name / "loss.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def before_step(patch: pytest.MonkeyPatch, act: Callable[[Trainer], None]) -> None:
    taken = Trainer.step

    def step(self: Trainer, batch: Batch) -> None:
        act(self)
        taken(self, batch)

    patch.setattr(Trainer, "step", step)


def stop_at(patch: pytest.MonkeyPatch, last: int) -> None:
    """SIGTERM within the step ``last``, the first being 1."""

    def act(trainer: Trainer) -> None:
        if trainer.steps == last - 1:
            signal.raise_signal(signal.SIGTERM)

    before_step(patch, act)
