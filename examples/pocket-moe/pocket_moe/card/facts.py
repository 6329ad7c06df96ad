"""Everything the model card is made of, read from the example's folder: records, manifest, configuration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocket_moe.config import PocketConfig
from pocket_moe.measure.samples import Sample, load_samples
from pocket_moe.model.fingerprint import held, noted, require
from pocket_moe.records import load_csv, load_greedy, load_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A run, read from its loss curve. ``minutes`` are those of the steps, the first ones' compilation included:
    evaluation and starts do not count. ``tokens_per_second`` is the median over the curve's lines, without it."""

    steps: int
    tokens: int
    peak_rate: float
    last_rate: float
    tokens_per_second: float
    minutes: float
    loss: float
    heldout: float
    balance: float
    peak: float
    training_curve: tuple[tuple[float, float], ...]
    heldout_curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """``agreement`` is None until it was measured. ``tried`` has the runs that the recipe was chosen from, if any."""

    config: PocketConfig
    perplexity: dict[str, Any]
    load: dict[str, Any]
    acceptance: dict[str, Any]
    text: dict[str, Any]
    manifest: dict[str, Any]
    agreement: dict[str, Any] | None
    samples: list[Sample]
    prompts: int
    smallest_margin: float
    smallest_router_margin: float
    demo: Sample
    logits: dict[str, Any]
    moe: Training
    dense: Training
    tried: dict[str, Any]

    @property
    def active(self) -> int:
        """Parameters that work on a token: of each layer's experts only the chosen ones."""
        config = self.config
        idle = config.num_experts - config.num_experts_per_tok
        return config.parameters() - config.num_hidden_layers * idle * 3 * config.hidden_size * config.width


def load_facts(root: Path) -> Facts:
    """Raises PocketError if a record is missing or damaged, or of other weights than ``root`` holds."""
    records, weights = root / "records", held(root)
    vllm, tried = records / "vllm.json", root / "tried.json"
    answers = load_greedy(records / "greedy.jsonl")
    model = {"model": weights["model"]}
    for name in ("experts.npz", "greedy.jsonl", "samples.jsonl", "demo.jsonl"):
        require(records / name, noted(records / name), model)
    return Facts(
        config=PocketConfig.from_json(load_json(root / "model/config.json")),
        perplexity=_measured(records / "perplexity.json", model),
        load=_measured(records / "load.json", model),
        acceptance=_measured(records / "acceptance.json", weights),
        text=load_json(records / "text.json"),
        manifest=load_json(root / "manifest.json"),
        agreement=_measured(vllm, model) if vllm.is_file() else None,
        samples=load_samples(records / "samples.jsonl"),
        prompts=len(answers),
        smallest_margin=min((answer.margin for answer in answers), default=math.inf),
        smallest_router_margin=min((answer.router_margin for answer in answers), default=math.inf),
        demo=load_samples(records / "demo.jsonl")[0],
        logits=_measured(records / "logits.json", model),
        moe=training(load_csv(records / "loss-moe.csv")),
        dense=training(load_csv(records / "loss-dense.csv")),
        tried=load_json(tried) if tried.is_file() else {},
    )


def _measured(record: Path, weights: Mapping[str, Any]) -> dict[str, Any]:
    values = load_json(record)
    require(record, values.get("weights"), weights)
    return values


def training(rows: Sequence[dict[str, str]]) -> Training:
    """Of the lines of a thinned ``loss.csv``: each stands for the tokens since the line before it."""
    measured = [row for row in rows if row["heldout"]]
    speeds = [float(row["tokens_per_second"]) for row in rows]
    tokens = [0, *(int(row["tokens"]) for row in rows)]
    seconds = sum((b - a) / max(1.0, v) for a, b, v in zip(tokens, tokens[1:], speeds, strict=False))
    last = rows[-1]
    return Training(
        steps=int(last["step"]),
        tokens=tokens[-1],
        peak_rate=max(float(row["lr"]) for row in rows),
        last_rate=float(last["lr"]),
        tokens_per_second=statistics.median(speeds),
        minutes=seconds / 60,
        loss=float(last["loss"]),
        heldout=float(measured[-1]["heldout"]) if measured else math.nan,
        balance=float(last["balance"]),
        peak=float(last["peak"]),
        training_curve=tuple((int(row["tokens"]) / 1e6, float(row["loss"])) for row in rows),
        heldout_curve=tuple((int(row["tokens"]) / 1e6, float(row["heldout"])) for row in measured),
    )
