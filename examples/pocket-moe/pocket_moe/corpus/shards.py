"""Tokens of a split on disk, read in place: ``<split>.tokens.bin``, ``<split>.index.npz`` and ``meta.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pocket_moe.errors import PocketError

REMAKE = "Make the shards again: python examples/pocket-moe/data.py"
SHUFFLE_SEED = 5
BATCH = 1024  # documents encoded at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What ``meta.json`` says."""

    vocab_size: int
    eos_id: int
    domains: list[str]
    tokenizer_sha256: str
    documents: dict[str, int]
    tokens: dict[str, int]
    tokens_by_domain: dict[str, dict[str, int]]


class Shards:
    """One split. ``tokens`` uint16, each document ending in <|endoftext|>; document d is ``starts[d]..starts[d + 1]``.

    Raises:
        PocketError: a file is missing, or its size or the tokenizer beside the folder does not match ``meta.json``.
    """

    def __init__(self, directory: Path, split: str) -> None:
        try:
            values: dict[str, Any] = json.loads((directory / "meta.json").read_text())
            self.meta = Meta(**values)
            self.tokens: NDArray[np.uint16] = np.memmap(directory / f"{split}.tokens.bin", dtype="<u2", mode="r")
            with np.load(directory / f"{split}.index.npz") as index:
                self.starts: NDArray[np.int64] = index["starts"]
                self.domain: NDArray[np.uint8] = index["domain"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PocketError(f"The shards in {directory} cannot be read: {error}", hint=REMAKE) from error
        if split not in self.meta.tokens or not self._is_whole(split):
            raise PocketError(f"The {split} shard in {directory} is incomplete.", hint=REMAKE)
        tokenizer = directory.parent / "tokenizer" / "tokenizer.json"
        if tokenizer.is_file() and tokenizer_sha256(tokenizer) != self.meta.tokenizer_sha256:
            raise PocketError(
                f"The shards in {directory} were made with another tokenizer than {tokenizer}.", hint=REMAKE
            )

    def _is_whole(self, split: str) -> bool:
        sizes = len(self.tokens), len(self.domain), len(self.starts), int(self.starts[-1])
        tokens, documents = self.meta.tokens[split], self.meta.documents[split]
        return sizes == (tokens, documents, documents + 1, tokens)


def tokenizer_sha256(path: Path) -> str:
    """Of a ``tokenizer.json`` as the tokenizers library lays it out; spaces between its parts make no other tokenizer.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    laid_out = json.dumps(json.loads(path.read_bytes()), indent=2, ensure_ascii=False)
    return hashlib.sha256(laid_out.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_shards(
    directory: Path, tokenizer_file: Path, eos_token: str, splits: Mapping[str, Mapping[str, Sequence[str]]]
) -> Meta:
    """Encodes ``splits`` (split -> domain -> texts) into ``directory``; domains numbered as in the first split.

    Documents are shuffled, always in the same way, so that any run of them mixes the domains.

    Raises:
        PocketError: the tokenizer cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing narrower
        raise PocketError(f"{tokenizer_file} cannot be read: {error}", hint=REMAKE) from error
    eos_id = tokenizer.token_to_id(eos_token)
    assert eos_id is not None, "the tokenizer lacks the document separator"
    directory.mkdir(parents=True, exist_ok=True)
    domains = list(next(iter(splits.values())))
    counts = {
        split: _write_split(directory, split, domains, texts, tokenizer, eos_id) for split, texts in splits.items()
    }
    meta = Meta(
        vocab_size=tokenizer.get_vocab_size(),
        eos_id=eos_id,
        domains=domains,
        tokenizer_sha256=tokenizer_sha256(tokenizer_file),
        documents={split: sum(map(len, texts.values())) for split, texts in splits.items()},
        tokens={split: sum(by_domain.values()) for split, by_domain in counts.items()},
        tokens_by_domain=counts,
    )
    (directory / "meta.json").write_text(json.dumps(asdict(meta), indent=1) + "\n", encoding="utf-8")
    return meta


def _encode(tokenizer: Tokenizer, texts: Sequence[str], eos_id: int) -> Iterable[NDArray[np.uint16]]:
    for first in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(list(texts[first : first + BATCH]), add_special_tokens=False):
            yield np.array([*encoding.ids, eos_id], "<u2")


def _write_split(
    directory: Path,
    split: str,
    domains: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    tokenizer: Tokenizer,
    eos_id: int,
) -> dict[str, int]:
    """Tokens of every domain."""
    documents = [document for domain in domains for document in _encode(tokenizer, texts[domain], eos_id)]
    of_domain = np.repeat(np.arange(len(domains), dtype=np.uint8), [len(texts[domain]) for domain in domains])
    sizes = np.array([len(document) for document in documents], np.int64)
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(documents))
    with (directory / f"{split}.tokens.bin").open("wb") as file:
        for index in order:
            file.write(documents[index].tobytes())
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])
    np.savez(directory / f"{split}.index.npz", starts=starts, domain=of_domain[order])
    return {name: int(sizes[of_domain == index].sum()) for index, name in enumerate(domains)}
