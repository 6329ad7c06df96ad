"""A source's file in, its documents out: one reader per format of ``sources.toml``."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pocket_moe.errors import PocketError
from pocket_moe.readers.dictd import read_dictd
from pocket_moe.readers.entries import devil_text, element_text, jargon_text
from pocket_moe.readers.go import go_documents
from pocket_moe.readers.html import html_documents
from pocket_moe.readers.kjv import chapters, read_windows
from pocket_moe.readers.novels import pieces, read_rdb
from pocket_moe.readers.pod import pod_documents
from pocket_moe.readers.sources import Source
from pocket_moe.readers.wordnet import Entry, parse_entry

Named = tuple[str, str]  # what of the file it is ("" for all or a piece of it), and its text

_TEXT_FORMATS: Final = frozenset({"html", "pod", "go", "gutenberg"})
_RESTRICTED: Final = tuple(
    re.compile(name)
    for name in (
        "CC[- ]BY-SA",
        "Attribution-ShareAlike",
        "NonCommercial",
        r"GNU\s+Free\s+Documentation\s+License",
        r"creativecommons\.org/licenses/by-(?:sa|nc)",
    )
)


def _read(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", "replace")


def _html(file: Path, source: Source) -> Iterator[Named]:
    yield from (("", text) for text in html_documents(_read(file), source.main))


def _pod(file: Path, _source: Source) -> Iterator[Named]:
    yield from (("", text) for text in pod_documents(_read(file), file.stem))


def _go(file: Path, _source: Source) -> Iterator[Named]:
    path = str(file).rpartition("/src/")[2]
    yield from (("", text) for text in go_documents(_read(file), path))


def _kjv(file: Path, _source: Source) -> Iterator[Named]:
    yield from chapters(read_windows(file))


def _gutenberg(file: Path, source: Source) -> Iterator[Named]:
    yield from (("", text) for text in pieces(_read(file), source.titles[file.stem]))


def _rdb(file: Path, _source: Source) -> Iterator[Named]:
    for novel in read_rdb(file):
        title = novel.strip().split("\n", 1)[0].title().replace(" And ", " and ")
        yield from (("", text) for text in pieces(novel, title))


def _dictionary(parse: Callable[[str], Named | None]) -> Callable[[Path, Source], Iterator[Named]]:
    def read(file: Path, _source: Source) -> Iterator[Named]:
        yield from filter(None, map(parse, read_dictd(file)))

    return read


READERS: dict[str, Callable[[Path, Source], Iterator[Named]]] = {
    "html": _html,
    "pod": _pod,
    "go": _go,
    "kjv": _kjv,
    "gutenberg": _gutenberg,
    "rdb": _rdb,
    "devil": _dictionary(devil_text),
    "jargon": _dictionary(jargon_text),
    "elements": _dictionary(element_text),
}


def read_file(file: Path, source: Source) -> Iterator[Named]:
    """The documents of one file.

    Raises:
        PocketError: ``sources.toml`` names a format that there is no reader for.
    """
    if source.format not in READERS:
        raise PocketError(
            f"{source.package}: there is no format {source.format!r}.",
            hint=f"Use one of {', '.join(READERS)}, wordnet.",
        )
    return READERS[source.format](file, source)


def restricted_licence(file: Path, source: Source) -> str:
    """What a text file names of licences under which weights may not ship as Apache-2.0; empty if nothing.

    A policy page that merely mentions one counts too: a page less is cheaper than one too many.
    """
    if source.format not in _TEXT_FORMATS:
        return ""
    text = _read(file)
    return next((match[0] for pattern in _RESTRICTED if (match := pattern.search(text))), "")


def read_entries(file: Path) -> list[Entry]:
    """The dictionary's entries: they are split by headword before they become documents."""
    return [entry for raw in read_dictd(file) if (entry := parse_entry(raw))]
