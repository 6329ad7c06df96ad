"""The King James Version as Debian packs it in, chapters out.

The file is the Bible Retrieval System's: a header, the offsets of windows of 64 KiB, and each window compressed as
compress(1) does (LZW, codes of 9 to 16 bits), without its magic number.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pocket_moe.errors import PocketError

MAGIC = b"EC02"
_TABLE = 0x54  # window size, number of windows, then one offset more than windows; all 32 bits, most significant first
_CLEAR, _FIRST_BITS, _MOST_BITS = 256, 9, 16
BOOKS = dict(
    pair.split("=")
    for pair in [
        "Ge=Genesis",
        "Exo=Exodus",
        "Lev=Leviticus",
        "Num=Numbers",
        "Deu=Deuteronomy",
        "Josh=Joshua",
        "Jdgs=Judges",
        "Ruth=Ruth",
        "1Sm=1_Samuel",
        "2Sm=2_Samuel",
        "1Ki=1_Kings",
        "2Ki=2_Kings",
        "1Chr=1_Chronicles",
        "2Chr=2_Chronicles",
        "Ezra=Ezra",
        "Neh=Nehemiah",
        "Est=Esther",
        "Job=Job",
        "Psa=Psalms",
        "Prv=Proverbs",
        "Eccl=Ecclesiastes",
        "SSol=Song_of_Solomon",
        "Isa=Isaiah",
        "Jer=Jeremiah",
        "Lam=Lamentations",
        "Eze=Ezekiel",
        "Dan=Daniel",
        "Hos=Hosea",
        "Joel=Joel",
        "Amos=Amos",
        "Obad=Obadiah",
        "Jonah=Jonah",
        "Mic=Micah",
        "Nahum=Nahum",
        "Hab=Habakkuk",
        "Zep=Zephaniah",
        "Hag=Haggai",
        "Zec=Zechariah",
        "Mal=Malachi",
        "Mat=Matthew",
        "Mark=Mark",
        "Luke=Luke",
        "John=John",
        "Acts=Acts",
        "Rom=Romans",
        "1Cor=1_Corinthians",
        "2Cor=2_Corinthians",
        "Gal=Galatians",
        "Eph=Ephesians",
        "Phi=Philippians",
        "Col=Colossians",
        "1Th=1_Thessalonians",
        "2Th=2_Thessalonians",
        "1Tim=1_Timothy",
        "2Tim=2_Timothy",
        "Titus=Titus",
        "Phmn=Philemon",
        "Heb=Hebrews",
        "Jas=James",
        "1Pet=1_Peter",
        "2Pet=2_Peter",
        "1Jn=1_John",
        "2Jn=2_John",
        "3Jn=3_John",
        "Jude=Jude",
        "Rev=Revelation",
    ]
)
_VERSE = re.compile(r"^(\w+?)(\d+):(\d+) (.+)$", re.MULTILINE)


def _codes(data: bytes) -> Iterator[tuple[int, bool]]:
    """Codes of a window and whether the table was just cleared. Codes come in groups of eight; when their width
    changes, the rest of a group is padding."""
    position = start = 0
    width, entries = _FIRST_BITS, _CLEAR
    while position + width <= 8 * len(data):
        first = position // 8
        code = int.from_bytes(data[first : first + 4], "little") >> (position % 8) & ((1 << width) - 1)
        position += width
        entries += 1
        if code == _CLEAR:
            position = start = position + -(position - start) % (8 * width)
            width, entries = _FIRST_BITS, _CLEAR
            yield code, True
            continue
        yield code, False
        if entries >= 1 << width and width < _MOST_BITS:
            position = start = position + -(position - start) % (8 * width)
            width += 1


def decompress(data: bytes) -> bytes:
    """One window of LZW."""
    out = bytearray()
    literals = [bytes([value]) for value in range(256)] + [b""]
    table = list(literals)
    previous = b""
    for code, cleared in _codes(data):
        if cleared:
            table, previous = list(literals), b""
            continue
        word = table[code] if code < len(table) else previous + previous[:1]
        if previous:
            table.append(previous + word[:1])
        out += word
        previous = word
    return bytes(out)


def read_windows(path: Path) -> str:
    """The whole text of ``bible.data``.

    Raises:
        PocketError: it is not in the expected format.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise PocketError(f"{path} is not the packed text it should be.", hint="Check bible-kjv-text's version: 4.38.")
    _, windows = struct.unpack_from(">2I", data, _TABLE)
    offsets = struct.unpack_from(f">{windows + 1}I", data, _TABLE + 8)
    return b"".join(decompress(data[a:b]) for a, b in pairwise(offsets)).decode("latin-1")


def chapters(text: str) -> Iterator[tuple[str, str]]:
    """(name, document) of every chapter: ``Genesis 1``, an empty line, then numbered verses, one a line."""
    verses: dict[str, list[str]] = {}
    for book, chapter, verse, words in _VERSE.findall(text):
        name = f"{BOOKS.get(book, book).replace('_', ' ')} {chapter}"
        verses.setdefault(name, []).append(f"{verse} {' '.join(words.split())}")
    for name, lines in verses.items():
        yield name, "\n".join([name, "", *lines])
