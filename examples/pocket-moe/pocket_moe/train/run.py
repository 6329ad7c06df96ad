"""A training run from its options to its last checkpoint: what ``train.py`` does, without the command line.

Reads ``WORK/shards`` and ``WORK/tokenizer``; writes ``WORK/runs/NAME/``: checkpoints, ``loss.csv`` and ``model/``.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from pocket_moe.config import POCKET, PocketConfig, tiny
from pocket_moe.corpus.batches import Batches
from pocket_moe.corpus.shards import Shards
from pocket_moe.errors import PocketError
from pocket_moe.measure.heldout import Heldout
from pocket_moe.model import export
from pocket_moe.model.dense import dense_like, speculator
from pocket_moe.model.model import PocketMoe
from pocket_moe.train import checkpoint
from pocket_moe.train.checkpoint import Identity
from pocket_moe.train.curve import Curve, Line
from pocket_moe.train.device import open_device
from pocket_moe.train.loop import Trainer
from pocket_moe.train.memory import told_when_full
from pocket_moe.train.run_settings import RunSettings, identity_of

SMALLER = "Pass --resume with a smaller --chunk-rows, or a new --run with a smaller --rows."


def train(settings: RunSettings) -> None:
    """Train until the last step, the time limit or a signal; leave a checkpoint, and at the end an export.

    Raises:
        PocketError: shards, tokenizer, checkpoint or options do not fit, or memory does not suffice.
    """
    with told_when_full(SMALLER, f"{settings.batches.rows} rows of {settings.batches.length} tokens"):
        _train(settings)


def _train(settings: RunSettings) -> None:
    device = open_device(settings.device, hint="Pass --device cpu, or --smoke for a short trial.")
    torch.manual_seed(settings.batches.seed)
    shards = Shards(settings.work / "shards", "train")
    config = _config(settings, shards)
    model = _model(settings, config, device, shards.meta.tokenizer_sha256)
    trainer = Trainer(model, settings.training, dtype=_dtype(settings), batch_tokens=settings.batches.tokens)
    identity = identity_of(settings, config, shards)
    _continue(settings, trainer, identity)
    with Batches(shards, settings.batches, device, pad_id=config.pad_token_id) as batches:
        _Part(settings, trainer, identity, batches, _heldout(settings, config, device)).run()
    if trainer.steps >= settings.steps:
        export_run(settings.work, settings.name)


def export_run(work: Path, name: str, dtype: str = "bfloat16") -> Path:
    """``runs/NAME/model`` from the run's last checkpoint.

    Raises:
        PocketError: there is none, or the run was trained with another tokenizer than ``work`` holds now.
    """
    run, tokenizer = work / "runs" / name, work / "tokenizer"
    export.save(checkpoint.load_weights(run, tokenizer_dir=tokenizer), tokenizer, run / "model", dtype)
    return run / "model"


class _Part:
    """The steps between one start and the next stop."""

    def __init__(
        self, settings: RunSettings, trainer: Trainer, identity: Identity, batches: Batches, heldout: Heldout
    ) -> None:
        self._settings, self._trainer, self._identity = settings, trainer, identity
        self._batches, self._heldout = batches, heldout
        self._curve = Curve(settings.folder / "loss.csv", list(heldout.tokens), keep=trainer.steps)
        self._saved = self._logged = trainer.steps
        self._clock = time.monotonic()

    def run(self) -> None:
        settings, trainer = self._settings, self._trainer
        deadline = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes
        print(f"{settings.name}: {_summary(trainer, self._batches)}", flush=True)
        with _signals() as stop:
            self._clock = time.monotonic()
            while trainer.steps < settings.steps and not stop:
                trainer.step(self._batches.batch(trainer.steps))
                if self._due(settings.log_every):
                    self._log()
                    if time.monotonic() >= deadline:
                        stop.append("the time limit")
                if self._due(settings.save_every):
                    self._save()
        self._save()
        if stop:
            print(f"stopped by {stop[0]} at step {trainer.steps}; go on with --resume", flush=True)

    def _due(self, every: int) -> bool:
        return self._trainer.steps % every == 0 or self._trainer.steps == self._settings.steps

    def _log(self) -> None:
        """A line for the steps since the last one. Evaluation and checkpoints are not counted into the speed."""
        settings, trainer = self._settings, self._trainer
        if trainer.steps == self._logged:
            return
        self._require_finite()
        stats = trainer.read()
        seconds = max(1e-9, time.monotonic() - self._clock)
        tokens, taken = trainer.steps * settings.batches.tokens, trainer.steps - self._logged
        # Where the steps of two logs hold a multiple of eval_every.
        due = trainer.steps // settings.eval_every > self._logged // settings.eval_every
        self._curve.add(
            Line(
                step=trainer.steps,
                tokens=tokens,
                lr=settings.training.schedule.rate(tokens),
                stats=stats,
                tokens_per_second=taken * settings.batches.tokens / seconds,
                steps_left=settings.steps - trainer.steps,
                seconds_per_step=seconds / taken,
                heldout=self._evaluate() if due or trainer.steps == settings.steps else None,
            )
        )
        self._logged, self._clock = trainer.steps, time.monotonic()

    def _evaluate(self) -> dict[str, float]:
        with self._trainer.evaluating() as model:
            by_domain = self._heldout.evaluate(model)
        return {"": self._heldout.mean(by_domain)} | by_domain

    def _require_finite(self) -> None:
        """Before a line, and so before a checkpoint: the last one is a good one."""
        if not self._trainer.finite():
            raise PocketError(
                f"The loss or its gradient is no longer finite at step {self._trainer.steps}.",
                hint=f"Start a new --run with a smaller --lr; the checkpoint of step {self._saved} is kept."
                if self._saved
                else "Start a new --run with a smaller --lr.",
            )

    def _save(self) -> None:
        """A checkpoint, after a line up to it: a run that goes on counts its next line from here."""
        if self._trainer.steps == self._saved:
            return
        self._log()
        folder, keep = self._settings.folder, self._settings.keep
        if keep != "small":
            checkpoint.save_full(folder, self._trainer, self._identity)
        if keep != "full":
            checkpoint.save_small(folder, self._trainer, self._identity)
        self._saved, self._clock = self._trainer.steps, time.monotonic()


def _dtype(settings: RunSettings) -> torch.dtype:
    return torch.float32 if settings.dtype == "float32" else torch.bfloat16


def _config(settings: RunSettings, shards: Shards) -> PocketConfig:
    meta = shards.meta
    config = POCKET if settings.size == "pocket" else dataclasses.replace(tiny(), vocab_size=meta.vocab_size)
    if (meta.vocab_size, meta.eos_id) != (config.vocab_size, config.eos_token_id):
        raise PocketError(
            f"The shards were made with a tokenizer of {meta.vocab_size} tokens whose end is {meta.eos_id}; "
            f"the model knows {config.vocab_size} tokens, and its end is {config.eos_token_id}.",
            hint="Make tokenizer and shards again: python examples/pocket-moe/data.py",
        )
    if settings.batches.length > config.max_position_embeddings:
        raise PocketError(
            f"Rows of {settings.batches.length} tokens are longer than the model's "
            f"{config.max_position_embeddings} positions.",
            hint="Pass a smaller --length.",
        )
    return {"moe": config, "dense": dense_like(config), "speculator": speculator(config)}[settings.kind]


def _model(settings: RunSettings, config: PocketConfig, device: torch.device, tokenizer_sha256: str) -> PocketMoe:
    model = PocketMoe(config, dropout=settings.dropout, options=settings.options)
    if settings.start is not None:
        given = export.load(settings.start)
        export.require_tokenizer(settings.start, tokenizer_sha256)
        if given.config != config:
            raise PocketError(
                f"The model in {settings.start} has another configuration.", hint="Pass another --start, or none."
            )
        model.load_state_dict(given.state_dict())
    return model.to(device)


def _continue(settings: RunSettings, trainer: Trainer, identity: Identity) -> None:
    run = settings.folder
    if settings.resume:
        exact = checkpoint.resume(run, trainer, identity)
        print(f"resumed at step {trainer.steps}{'' if exact else ', approximately, from the small checkpoint'}")
    elif (run / checkpoint.FULL).exists() or (run / checkpoint.SMALL).exists():
        raise PocketError(
            f"There is a run {settings.name} already.", hint="Pass --resume to go on with it, or choose another --run."
        )


def _heldout(settings: RunSettings, config: PocketConfig, device: torch.device) -> Heldout:
    return Heldout(
        Shards(settings.work / "shards", "heldout"),
        device,
        tokens_per_domain=settings.eval_tokens,
        length=settings.batches.length,
        pad_id=config.pad_token_id,
        rows=settings.batches.rows,
    )


def _summary(trainer: Trainer, batches: Batches) -> str:
    return f"{trainer.model.config.parameters():,} parameters, {batches.per_epoch} steps per epoch on {trainer.device}"


@contextmanager
def _signals() -> Iterator[list[str]]:
    """A list that SIGINT and SIGTERM put their name in; a second SIGINT interrupts at once."""
    stop: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
