"""Documents in, training and held-out documents out. Which is which depends on the ids alone, not on their order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from pocket_moe.readers.text import Document
from pocket_moe.readers.wordnet import Entry, entry_text

HELDOUT_SHARE = 0.02
HEADWORD_SHARE = 0.01  # of the dictionary: with the synonyms that follow, it comes to 2 % of the entries
DEMO = "lighthouse"
SHOWN = frozenset({DEMO})  # what the documents of this project look up, always in training
SMALLEST_HELDOUT = 24  # documents of a small domain, but no more than an eighth of it
SEED = b"pocket-moe 2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Both halves of a domain."""

    train: list[Document]
    heldout: list[Document]


def rank(name: str) -> bytes:
    """A fixed shuffled order of names."""
    return blake2b(name.encode(), key=SEED, digest_size=16).digest()


def chosen(names: Iterable[str], share: float = HELDOUT_SHARE) -> set[str]:
    """The held-out ones: ``share`` of ``names``, more of a small domain."""
    ordered = sorted(set(names), key=rank)
    count = max(round(share * len(ordered)), min(SMALLEST_HELDOUT, len(ordered) // 8))
    return set(ordered[:count])


def split_documents(documents: Sequence[Document]) -> Split:
    """By document."""
    heldout = chosen(document.id for document in documents)
    return Split(
        train=[document for document in documents if document.id not in heldout],
        heldout=[document for document in documents if document.id in heldout],
    )


def _word(entry: Entry) -> str:
    """What counts as one headword: 'Mercury' and 'mercury', 'house-cat' and 'house cat'."""
    return entry.headword.lower().replace("-", " ").replace("_", " ")


def _gloss(gloss: str) -> str:
    """A gloss as it is compared: 'very small' and '(informal) very small' are one."""
    return re.sub(r"^\([^)]*\) ", "", " ".join(gloss.lower().split())).strip(".")


def _glosses(entries: Iterable[Entry]) -> set[str]:
    return {_gloss(sense.gloss) for entry in entries for sense in entry.senses}


def split_entries(entries: Sequence[Entry], domain: str, package: str) -> Split:
    """By headword, and no gloss on both sides.

    Synonyms share glosses, so those of the headwords held out are taken from the entries of their synonyms in training;
    a synonym that has no other goes to the held-out side. Whole groups of synonyms would not do: through words of many
    meanings most of the dictionary is one group, and only rare words would be left to hold out.
    """
    shown = _glosses(entry for entry in entries if _word(entry) in SHOWN)
    words = {_word(entry) for entry in entries} - {_word(entry) for entry in entries if _glosses([entry]) & shown}
    drawn = chosen(words, HEADWORD_SHARE)
    glosses = _glosses(entry for entry in entries if _word(entry) in drawn)
    kept = {_word(entry) for entry in entries if _glosses([entry]) - glosses} - drawn
    heldout = [entry for entry in entries if _word(entry) not in kept]
    train = [_without(entry, glosses) for entry in entries if _word(entry) in kept]
    return Split(train=_documents(train, domain, package), heldout=_documents(heldout, domain, package))


def _documents(entries: Iterable[Entry], domain: str, package: str) -> list[Document]:
    texts = {f"{package}:{entry.headword}": entry_text(entry) for entry in entries if entry.senses}
    return [Document(id=name, domain=domain, text=text) for name, text in texts.items()]


def _without(entry: Entry, glosses: set[str]) -> Entry:
    return replace(entry, senses=tuple(sense for sense in entry.senses if _gloss(sense.gloss) not in glosses))
