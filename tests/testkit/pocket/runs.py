"""A working folder for the pocket model's training: small shards of made-up text, and a tokenizer to go with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCAB = 64
DOMAINS = ["dictionary", "verse"]


def make_work(work: Path, *, documents: int = 300) -> Path:
    """``shards/`` of two domains and ``tokenizer/``. Words follow one another by rule, so that there is much to learn;
    two documents are longer than the rows of a smoke run."""
    folder = work / "tokenizer"
    folder.mkdir(parents=True)
    words = {word: index for index, word in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"])}
    words |= {f"w{index}": index for index in range(4, VOCAB)}
    Tokenizer(WordLevel(words, unk_token="<|pad|>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    rng = np.random.default_rng(0)
    counts = {split: _write_split(work / "shards", split, size, rng) for split, size in _sizes(documents)}
    meta = {
        "vocab_size": VOCAB,
        "eos_id": 0,
        "domains": DOMAINS,
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "documents": {split: count["documents"] for split, count in counts.items()},
        "tokens": {split: count["tokens"] for split, count in counts.items()},
        "tokens_by_domain": {split: count["by_domain"] for split, count in counts.items()},
    }
    (work / "shards" / "meta.json").write_text(json.dumps(meta))
    return work


def _sizes(documents: int) -> list[tuple[str, int]]:
    return [("train", documents), ("heldout", max(4, documents // 10))]


def _write_split(folder: Path, split: str, documents: int, rng: np.random.Generator) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    lengths = rng.integers(3, 40, documents)
    lengths[:2] = 150, 200
    domain = (rng.random(documents) < 0.5).astype(np.uint8)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.concatenate([_document(size, kind, rng) for size, kind in zip(lengths, domain, strict=True)])
    tokens.astype("<u2").tofile(folder / f"{split}.tokens.bin")
    np.savez(folder / f"{split}.index.npz", starts=starts, domain=domain)
    by_domain = {name: int(lengths[domain == index].sum()) for index, name in enumerate(DOMAINS)}
    return {"documents": documents, "tokens": len(tokens), "by_domain": by_domain}


def _document(size: int, domain: int, rng: np.random.Generator) -> np.ndarray:
    """Each word is the last plus one, or plus seven in the second domain; the end is <|endoftext|>."""
    step = 7 if domain else 1
    words = 4 + (rng.integers(0, VOCAB) + step * np.arange(size)) % (VOCAB - 4)
    words[-1] = 0
    return words
