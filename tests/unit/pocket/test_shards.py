"""Shards on disk: what was written is read, and anything that does not fit together is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from testkit.pocket.packages import TOPICS, prose
from tokenizers import Tokenizer

from pocket_moe.corpus.shards import Shards, write_shards
from pocket_moe.corpus.tokenizer import END_OF_TEXT, train_tokenizer, write_tokenizer
from pocket_moe.errors import PocketError

TEXTS = {
    "train": {"b": [prose(topic, 1) for topic in TOPICS], "a": ["one", "two"]},
    "heldout": {"b": ["The anchor."], "a": ["three"]},
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_tokenizer(train_tokenizer(TEXTS["train"]["b"], 340), tmp_path / "tokenizer")
    write_shards(tmp_path / "shards", tmp_path / "tokenizer" / "tokenizer.json", END_OF_TEXT, TEXTS)
    return tmp_path


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_documents_come_back_with_their_domain(work: Path, split: str) -> None:
    shards = Shards(work / "shards", split)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    found: dict[str, list[str]] = {"b": [], "a": []}
    for index, domain in enumerate(shards.domain):
        ids = shards.tokens[shards.starts[index] : shards.starts[index + 1]].tolist()
        assert ids[-1] == shards.meta.eos_id
        found[shards.meta.domains[domain]].append(tokenizer.decode(ids[:-1]))
    for name, texts in TEXTS[split].items():
        assert sorted(found[name]) == sorted(texts)
    if split == "train":
        assert shards.domain.tolist() != sorted(shards.domain.tolist()), "documents are shuffled"
    assert shards.meta.tokens[split] == len(shards.tokens) == sum(shards.meta.tokens_by_domain[split].values())


def _cut_tokens(work: Path) -> None:
    path = work / "shards" / "train.tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])


def _shift_starts(work: Path) -> None:
    with np.load(work / "shards" / "train.index.npz") as index:
        np.savez(work / "shards" / "train.index.npz", starts=index["starts"][:-1], domain=index["domain"])


def _other_tokenizer(work: Path) -> None:
    write_tokenizer(train_tokenizer(TEXTS["train"]["b"], 300), work / "tokenizer")


def _unknown_field(work: Path) -> None:
    path = work / "shards" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": 1}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_cut_tokens, "incomplete"),
        (_shift_starts, "incomplete"),
        (_other_tokenizer, "another tokenizer"),
        (_unknown_field, "cannot be read"),
        (lambda work: (work / "shards" / "train.index.npz").unlink(), "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(work: Path, harm: Callable[[Path], None], said: str) -> None:
    harm(work)
    with pytest.raises(PocketError, match=said) as caught:
        Shards(work / "shards", "train")
    assert "data.py" in caught.value.hint


def test_an_unreadable_tokenizer_and_an_unknown_split(work: Path) -> None:
    with pytest.raises(PocketError, match=r"none\.json cannot be read"):
        write_shards(work / "other", work / "none.json", END_OF_TEXT, TEXTS)
    with pytest.raises(PocketError, match=r"incomplete|cannot be read"):
        Shards(work / "shards", "dev")
