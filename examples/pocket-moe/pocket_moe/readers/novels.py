"""Public-domain books in (Project Gutenberg's text, or R's data of Jane Austen's works), pieces of chapters out."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from pocket_moe.errors import PocketError
from pocket_moe.readers.text import normalise

PIECE_CHARS = 5000
_START = re.compile(r"^\*\*\* ?START OF.*$|^Produced by .*(?:\n.+)*$", re.MULTILINE)
_END = re.compile(r"^\*\*\* ?END OF|^End of (?:the |this )?Project Gutenberg|^THE END\.?$", re.MULTILINE)
_CHAPTER = re.compile(r"^(?:CHAPTER|Chapter|VOLUME|ADVENTURE|EPILOGUE|ETYMOLOGY|PROP\.|Quest\.)\b.{0,60}$")
_STRING, _LENGTH = 16, struct.Struct(">I")  # R's serialization: the type of a vector of strings; all lengths are so


def _strings(data: bytes) -> list[str]:
    """The vector of strings in R's XDR serialization, version 3."""
    encoding_bytes = _LENGTH.unpack_from(data, 14)[0]
    at = 18 + encoding_bytes
    kind, count = struct.unpack_from(">II", data, at)
    if kind & 0xFF != _STRING:
        raise ValueError(f"type {kind & 0xFF} is no vector of strings")
    at += 8
    strings = []
    for _ in range(count):
        size = struct.unpack_from(">4xi", data, at)[0]
        strings.append(data[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
        at += 8 + max(size, 0)
    return strings


def read_rdb(path: Path) -> list[str]:
    """The texts in a lazy-load database of R, whose values are all vectors of lines.

    Raises:
        PocketError: it holds something else.
    """
    data, texts = path.read_bytes(), []
    try:
        while data:
            inflater = zlib.decompressobj()
            texts.append("\n".join(_strings(inflater.decompress(data[4:]))))
            data = inflater.unused_data
    except (zlib.error, struct.error, ValueError) as error:
        raise PocketError(
            f"{path} cannot be read: {error}", hint="Check r-cran-janeaustenr's version: 1.0.0-1."
        ) from error
    return texts


def body(text: str) -> str:
    """A book without the frame that Project Gutenberg puts around it."""
    text = text.replace("\r\n", "\n").replace("\ufeff", "")
    starts = [match.end() for match in _START.finditer(text) if match.end() < len(text) // 4]
    text = text[max(starts, default=0) :]
    end = next((match.start() for match in _END.finditer(text) if match.start() > len(text) // 2), len(text))
    return text[:end]


def _paragraphs(text: str) -> Iterator[str]:
    for part in re.split(r"\n\s*\n", text):
        line = normalise(part).replace("_", "").replace("--", "—")
        if line and not set(line) <= set("*-=~ .[]0123456789"):
            yield line


def pieces(text: str, book: str) -> Iterator[str]:
    """Documents of one book: ``Book, chapter`` as title, some paragraphs each, cut at chapters."""
    parts: list[str] = []
    title, size = book, 0
    for paragraph in _paragraphs(body(text)):
        is_chapter = bool(_CHAPTER.match(paragraph))
        if is_chapter or size >= PIECE_CHARS:
            if size >= PIECE_CHARS // 8:
                yield "\n\n".join([title, *parts])
            parts, size = [], 0
        if is_chapter:
            title = f"{book}, {_chapter_name(paragraph)}"
            continue
        parts.append(paragraph)
        size += len(paragraph)
    if size >= PIECE_CHARS // 8:
        yield "\n\n".join([title, *parts])


def _chapter_name(line: str) -> str:
    word, _, rest = line.rstrip(". ").partition(" ")
    return f"{word.lower()} {rest}".strip()
