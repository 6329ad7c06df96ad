"""A target and its training text in, a pool of small speculators out, each taught what those before it miss.

ExpertFlow, section 3.4, and SpecInfer's boost-tuning: the first speculator learns the target's greedy tokens; where it
is right a position is covered. The next one goes on from the first one's weights with covered positions at weight
``floor``, and so on. Floors are compared by the union's acceptance on training rows kept aside.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pocket_moe.config import PocketConfig
from pocket_moe.model.losses import NO_TARGET
from pocket_moe.model.model import Options, PocketMoe
from pocket_moe.speculators.boost_rows import LabelledRows, WeightedSource, best_tokens
from pocket_moe.train.loop import Trainer, TrainSettings
from pocket_moe.train.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class BoostSettings:
    """``steps`` are the first speculator's, ``boost_steps`` the others'; ``aside``: share of rows to compare on."""

    count: int = 3
    floors: tuple[float, ...] = (0.0, 0.1)
    steps: int = 3000
    boost_steps: int = 2000
    rows: int = 128
    lr: float = 3e-3
    boost_lr: float = 1.5e-3
    aside: float = 0.02
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    graph: bool = False
    compile: bool = False
    options: Options = field(default_factory=Options)
    log_every: int = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The speculators in float32 and evaluation mode, and for each what was tried: floor and union's acceptance."""

    speculators: list[PocketMoe]
    tried: list[dict[str, Any]]


def boost(config: PocketConfig, rows: LabelledRows, settings: BoostSettings) -> Pool:
    """Train ``settings.count`` speculators of one configuration, on the device where the rows are."""
    learn, aside = _split(rows, settings)
    covered_RL, aside_RL = (torch.zeros_like(part.labels_RL, dtype=torch.bool) for part in (learn, aside))
    pool = Pool(speculators=[], tried=[])
    for index in range(settings.count):
        floors = settings.floors if index else (1.0,)
        start = pool.speculators[0] if index else None
        trials = [train_one(config, learn, covered_RL, floor, settings, start, index) for floor in floors]
        unions = [union_share(model, aside, aside_RL, settings.rows) for model in trials]
        best = int(np.argmax(unions))
        for floor, share in zip(floors, unions, strict=True):
            pool.tried.append({"speculator": index, "floor": floor, "union_aside": round(share, 5)})
            print(f"speculator {index}, floor {floor}: the union is right at {share:.4f} of positions", flush=True)
        pool.speculators.append(trials[best])
        covered_RL |= right(trials[best], learn, settings.rows)
        aside_RL |= right(trials[best], aside, settings.rows)
    return pool


def train_one(
    config: PocketConfig,
    rows: LabelledRows,
    covered_RL: Tensor,
    floor: float,
    settings: BoostSettings,
    start: PocketMoe | None,
    index: int,
) -> PocketMoe:
    """From ``start``'s weights or new ones; positions covered so far count ``floor``, the others 1."""
    if settings.compile:
        torch.compiler.reset()  # compiled code is kept per function, and for few models
    torch.manual_seed(settings.seed + index)
    model = PocketMoe(config, options=settings.options)
    if start is not None:
        model.load_state_dict(start.state_dict())
    weights_RL = torch.where(covered_RL, floor, 1.0).to(torch.float16)
    source = WeightedSource(rows, weights_RL, batch_rows=settings.rows, seed=settings.seed + index)
    boosted = start is not None
    batch_tokens = settings.rows * rows.tokens_RL.shape[1]
    trainer = Trainer(
        model.to(rows.tokens_RL.device).train(),
        _training(settings, batch_tokens, boosted=boosted),
        dtype=settings.dtype,
        batch_tokens=batch_tokens,
    )
    steps = settings.boost_steps if boosted else settings.steps
    _run(trainer, source, steps, batch_tokens, settings.log_every)
    # Compiled parts and a captured step go away with the trainer.
    trained = PocketMoe(config, options=settings.options).to(rows.tokens_RL.device)
    trained.load_state_dict(trainer.weights())
    return trained.eval()


def right(model: PocketMoe, rows: LabelledRows, batch_rows: int) -> Tensor:
    """bool ``[R, L]``: where the model's most likely token is the label."""
    found_RL = torch.zeros_like(rows.labels_RL, dtype=torch.bool)
    for part, tokens_BL, positions_BL in rows.chunks(batch_rows):
        found_RL[part] = best_tokens(model, tokens_BL, positions_BL, 1).squeeze(2) == rows.labels_RL[part]
    return found_RL


def union_share(model: PocketMoe, rows: LabelledRows, covered_RL: Tensor, batch_rows: int) -> float:
    """Share of labelled positions that ``model`` or those that covered the rest get right."""
    either_RL = covered_RL | right(model, rows, batch_rows)
    return float(either_RL.sum() / (rows.labels_RL != NO_TARGET).sum().clamp_min(1))


def _training(settings: BoostSettings, batch_tokens: int, *, boosted: bool) -> TrainSettings:
    steps = settings.boost_steps if boosted else settings.steps
    schedule = Schedule(
        kind="cosine",
        peak=settings.boost_lr if boosted else settings.lr,
        warmup=min(100, steps // 10 + 1) * batch_tokens,
        total=steps * batch_tokens,
    )
    return TrainSettings(schedule=schedule, graph=settings.graph, compile=settings.compile)


def _run(trainer: Trainer, source: WeightedSource, steps: int, batch_tokens: int, log_every: int) -> None:
    clock = time.monotonic()
    for step in range(steps):
        trainer.step(source.batch(step))
        if (step + 1) % log_every == 0 or step + 1 == steps:
            loss = trainer.read().loss
            speed = (step + 1) * batch_tokens / max(1e-9, time.monotonic() - clock)
            print(f"step {step + 1}/{steps} loss {loss:.4f}, {speed / 1000:.0f}k tokens/s", flush=True)


def _split(rows: LabelledRows, settings: BoostSettings) -> tuple[LabelledRows, LabelledRows]:
    """Rows to learn from, and rows to compare floors on: drawn, since packing sorts rows by length."""
    order = torch.from_numpy(np.random.default_rng(settings.seed).permutation(len(rows)))
    order = order.to(rows.tokens_RL.device)
    aside = max(1, round(settings.aside * len(rows)))
    return rows.take(order[aside:]), rows.take(order[:aside])
