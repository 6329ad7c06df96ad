"""Documents in, documents out without what was there before: equal paragraphs, and texts that nearly repeat others.

Order decides which of two survives, so it has to be the same in every run; hashes here are not Python's salted ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from zlib import crc32

from pocket_moe.readers.text import SHORTEST_CHARS, Document

LONG_PARAGRAPH = 160  # shorter ones may repeat: they open different texts
SHINGLE_WORDS = 8
SAMPLED = 8  # one shingle of so many is kept, chosen by its hash
MOST_REPEATED = 0.4
MOST_SHARED = 0.1  # of a held-out document's runs of words with the training text

_WORDS = re.compile(r"[a-z0-9']+")


def _key(paragraph: str) -> bytes:
    return blake2b(" ".join(_WORDS.findall(paragraph.lower())).encode(), digest_size=8).digest()


def runs(text: str) -> set[int]:
    """Hashes of all runs of eight words."""
    words = _WORDS.findall(text.lower())
    return {crc32(" ".join(words[i : i + SHINGLE_WORDS]).encode()) for i in range(len(words) - SHINGLE_WORDS + 1)}


def shingles(text: str) -> set[int]:
    """A sample of them."""
    return {run for run in runs(text) if run % SAMPLED == 0}


def unlike(heldout: Mapping[str, Sequence[Document]], train: Iterable[Document]) -> dict[str, list[Document]]:
    """Held-out documents by domain, without those that share more than ``MOST_SHARED`` of their runs with ``train``."""
    own = [[runs(document.text) for document in documents] for documents in heldout.values()]
    wanted = set().union(*(run for domain in own for run in domain))
    seen: set[int] = set()
    for document in train:
        seen |= runs(document.text) & wanted
    return {
        name: [document for document, of_it in zip(documents, domain, strict=True) if _new(of_it, seen)]
        for (name, documents), domain in zip(heldout.items(), own, strict=True)
    }


def _new(of_it: set[int], seen: set[int]) -> bool:
    return len(of_it & seen) <= MOST_SHARED * len(of_it)


class Deduper:
    """Remembers every paragraph and a sample of all runs of words that it let through."""

    def __init__(self) -> None:
        self._paragraphs: set[bytes] = set()
        self._shingles: set[int] = set()
        self.dropped_documents = 0
        self.dropped_paragraphs = 0

    def keep(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Documents whose text is new, without the long paragraphs that are not."""
        for document in documents:
            text = self._new_text(document.text)
            seen = shingles(text)
            repeated = len(seen & self._shingles)
            if len(text) < min(SHORTEST_CHARS, len(document.text)) or repeated > MOST_REPEATED * len(seen):
                self.dropped_documents += 1
                continue
            self._shingles |= seen
            yield replace(document, text=text)

    def _new_text(self, text: str) -> str:
        title, *parts = text.split("\n\n")
        kept = [title]
        for part in parts:
            key = _key(part)
            if len(part) >= LONG_PARAGRAPH and key in self._paragraphs:
                self.dropped_paragraphs += 1
                continue
            self._paragraphs.add(key)
            kept.append(part)
        return "\n\n".join(kept)
