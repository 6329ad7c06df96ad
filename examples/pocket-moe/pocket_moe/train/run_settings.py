"""What a run is asked to do, and what of it must stay the same while the run goes on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pocket_moe.config import PocketConfig
from pocket_moe.corpus.batches import BatchSettings
from pocket_moe.corpus.shards import Shards
from pocket_moe.model.model import Options
from pocket_moe.train.checkpoint import Identity
from pocket_moe.train.loop import TrainSettings

Kind = Literal["moe", "dense", "speculator"]
Keep = Literal["full", "small", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """``steps`` is where the run ends, counted over all its parts; ``minutes`` ends this part."""

    work: Path
    name: str
    kind: Kind = "moe"
    size: Literal["pocket", "tiny"] = "pocket"
    steps: int = 10_000
    minutes: float | None = None
    batches: BatchSettings = field(default_factory=BatchSettings)
    training: TrainSettings
    options: Options = field(default_factory=Options)
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cuda"
    resume: bool = False
    start: Path | None = None
    log_every: int = 20
    eval_every: int = 500
    eval_tokens: int = 16_384
    save_every: int = 2_000
    keep: Keep = "full"

    @property
    def folder(self) -> Path:
        return self.work / "runs" / self.name


def identity_of(settings: RunSettings, config: PocketConfig, shards: Shards) -> Identity:
    """What a checkpoint of the run is held against before the run goes on from it."""
    return Identity(config=config, data=_data(settings, shards), training=_training(settings))


def _data(settings: RunSettings, shards: Shards) -> dict[str, object]:
    """What decides the tokens of each step."""
    order = hashlib.sha256(shards.starts.tobytes() + shards.domain.tobytes()).hexdigest()
    return {
        "tokenizer": shards.meta.tokenizer_sha256,
        "documents": order,
        "rows": settings.batches.rows,
        "length": settings.batches.length,
        "seed": settings.batches.seed,
        "weights": dict(sorted(settings.batches.weights.items())),
    }


def _training(settings: RunSettings) -> dict[str, Any]:
    """What decides each step's update, under the names of ``train.py``'s options."""
    training, schedule = settings.training, settings.training.schedule
    return {
        "steps": schedule.total // settings.batches.tokens,
        "schedule": schedule.kind,
        "lr": schedule.peak,
        "lr-floor": schedule.floor,
        "warmup": schedule.warmup // settings.batches.tokens,
        "decay": schedule.decay,
        "weight-decay": training.weight_decay,
        "clip": training.clip,
        "balance": training.balance,
        "z-loss": training.z,
        "average": training.average,
        "dropout": settings.dropout,
        "dtype": settings.dtype,
    }
