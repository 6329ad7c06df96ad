"""A trained toy in the pocket model's shape, with shards, text and a tokenizer that spells every byte."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pocket_moe.config import PocketConfig, tiny
from pocket_moe.corpus.batches import Batches, BatchSettings
from pocket_moe.corpus.shards import Shards
from pocket_moe.model import export
from pocket_moe.model.dense import dense_like
from pocket_moe.model.model import PocketMoe
from pocket_moe.train.loop import Trainer, TrainSettings
from pocket_moe.train.schedule import Schedule
from testkit.pocket.runs import make_work

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/pocket-moe"
CPU = torch.device("cpu")
CONFIG = tiny(hidden_size=128, moe_intermediate_size=128, vocab_size=300)
"""Columns in groups of 128, as quantisation wants them; a vocabulary that holds every byte."""
WORDS = ["anchor", "beacon", "candle", "dory", "ebb", "fathom", "gale", "harbour", "inlet", "jetty", "keel", "lee"]


def make_evidence(work: Path) -> Path:
    """``work`` as ``data.py`` leaves it, small: shards of two domains, text of both, and a tokenizer for both."""
    make_work(work)
    file = work / "tokenizer/tokenizer.json"
    _tokenizer().save(str(file))
    meta = json.loads((work / "shards/meta.json").read_text())
    meta |= {"vocab_size": CONFIG.vocab_size, "tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    (work / "shards/meta.json").write_text(json.dumps(meta))
    for split, words in (("train", WORDS[:8]), ("heldout", WORDS[4:])):
        _write_text(work / "text" / split, split, words)
    return work


def make_models(work: Path) -> None:
    """Folders of a Mixture-of-Experts and of its dense rival, both trained for a moment."""
    for name, config in (("moe", CONFIG), ("dense", dense_like(CONFIG))):
        export.save(_train_briefly(config, work), work / "tokenizer", work / name, "float32")


def lively(config: PocketConfig, *, norms: float = 0.3, **arguments: Any) -> PocketMoe:
    """Random weights large enough that every part of the model shows in its logits; those of norms are about 1."""
    torch.manual_seed(1)
    model = PocketMoe(config, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (norms if parameter.dim() == 1 else 0.06))
            parameter += parameter.dim() == 1
    return model


def _train_briefly(config: PocketConfig, work: Path, steps: int = 30) -> PocketMoe:
    torch.manual_seed(0)
    model = PocketMoe(config).train()
    schedule = Schedule(peak=1e-2, warmup=4 * 256, total=steps * 256)
    trainer = Trainer(model, TrainSettings(schedule=schedule), dtype=torch.float32, batch_tokens=256)
    with Batches(Shards(work / "shards", "train"), BatchSettings(rows=4, length=64), CPU, pad_id=3) as batches:
        for step in range(steps):
            trainer.step(batches.batch(step))
    return model.eval()


def script(name: str) -> ModuleType:
    """``examples/pocket-moe/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(f"pocket_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"define: {word}\nWhat a {word} is, in full." for word in WORDS], trainer)
    return tokenizer


def _write_text(folder: Path, split: str, words: list[str]) -> None:
    folder.mkdir(parents=True)
    entries = [f"define: {word}\nWhat a {word} is.\nAnd more of it." for word in words]
    verses = [" ".join(words[turn:] + words[:turn]) + " and so on" * 20 for turn in range(len(words))]
    for domain, texts in (("dictionary", entries), ("verse", verses)):
        rows = [{"id": f"{split}:{index}", "domain": domain, "text": text} for index, text in enumerate(texts)]
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
