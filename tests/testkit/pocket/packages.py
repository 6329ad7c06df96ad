"""Unpacked packages as ``data.py`` finds them in its working folder, made up: a small dictionary and two manuals."""

from __future__ import annotations

import gzip
import string
from pathlib import Path
from random import Random

DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
TOPICS = (
    *("harbour", "lantern", "compass", "anchor", "rudder", "mast", "galley", "keel", "tide", "current", "channel"),
    *("buoy", "pilot", "crew", "cargo", "ballast", "rigging", "bowline", "windlass", "capstan"),
)
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: 2020 The Sailors
License: Expat

Files: debian/*
Copyright: 2021 A Packager
License: GPL-2+
 Not this one.

License: Expat
 Permission is hereby granted.
 .
 Without warranty.
"""
SOURCES = """
[[source]]
domain = "dictionary"
package = "dict-sea"
licence = "MIT"
notice = "Copyright 2020 The Sailors"
format = "wordnet"
files = ["usr/share/dictd/sea.index"]

[[source]]
domain = "manual"
package = "sea-doc"
licence = "MIT"
notice = "Copyright 2020 The Sailors"
format = "html"
main = "role=main"
files = ["usr/share/doc/sea-doc/html/*.html"]

[[source]]
domain = "pod"
package = "sea-perl"
licence = "MIT"
notice = "Copyright 2020 The Sailors"
format = "pod"
files = ["usr/share/perl/*.pod"]
"""


def base64_number(value: int) -> str:
    """dictd's index numbers."""
    digits = DIGITS[value % 64]
    while value := value // 64:
        digits = DIGITS[value % 64] + digits
    return digits


def write_dictd(folder: Path, name: str, entries: dict[str, str]) -> Path:
    """``name.index`` and ``name.dict.dz`` with ``entries`` (headword -> the whole entry's text)."""
    folder.mkdir(parents=True, exist_ok=True)
    data, rows = b"", []
    for word, entry in entries.items():
        raw = entry.encode()
        rows.append(f"{word}\t{base64_number(len(data))}\t{base64_number(len(raw))}")
        data += raw
    (folder / f"{name}.dict.dz").write_bytes(gzip.compress(data))
    index = folder / f"{name}.index"
    index.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return index


def prose(topic: str, number: int) -> str:
    """A paragraph that shares few runs of words with that of any other topic and number."""
    words = Random(f"{topic} {number}").choices(TOPICS, k=40)
    return (
        ". ".join(
            f"The {topic} of voyage {number} lies {a} and {b} to {c} {d}"
            for a, b, c, d in zip(*[iter(words)] * 4, strict=True)
        )
        + "."
    )


def write_packages(work: Path) -> Path:
    """The packages below ``work/unpacked`` and the list of them, whose path is returned."""
    for name in ("dict-sea", "sea-doc", "sea-perl"):
        doc = work / "unpacked" / name / "usr/share/doc" / name
        doc.mkdir(parents=True)
        (doc / "copyright").write_text(COPYRIGHT)
        (work / "unpacked" / name / "VERSION").write_text("1.0-1\n")
    entries = {word: f"{word}\n    n 1: a thing at sea called number {i}\n" for i, word in enumerate(TOPICS)}
    write_dictd(work / "unpacked/dict-sea/usr/share/dictd", "sea", entries)
    for topic in TOPICS:
        _write_manuals(work / "unpacked", topic)
    sources = work / "sources.toml"
    sources.write_text(SOURCES)
    return sources


def _write_manuals(unpacked: Path, topic: str) -> None:
    html = unpacked / "sea-doc/usr/share/doc/sea-doc/html" / f"{topic}.html"
    html.parent.mkdir(exist_ok=True)
    html.write_text(f"<title>{topic}</title><div role=main><h1>{topic.title()}</h1><p>{prose(topic, 1)}</p></div>")
    pod = unpacked / "sea-perl/usr/share/perl" / f"{topic}.pod"
    pod.parent.mkdir(parents=True, exist_ok=True)
    pod.write_text(f"=head1 NAME\n\n{topic} - about it\n\n=head1 DESCRIPTION\n\n{prose(topic, 7)}\n\n=cut\n")
