"""What went into the text: packages, versions, licences and notices. ``manifest.json``, which the model card lists."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pocket_moe.corpus.dedupe import MOST_SHARED
from pocket_moe.corpus.packages import Package
from pocket_moe.readers.sources import Source

WHOLE_FILE = 3000  # characters: a copyright file this short is its own licence text


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One source's share. ``bytes`` of UTF-8 text after cleaning, both splits, those dropped later too;
    ``licence_file`` within the package; ``left_out`` files that name a licence of another kind."""

    package: str
    version: str
    domain: str
    licence: str
    notice: str
    licence_file: str
    licence_text: str
    documents: int
    bytes: int
    left_out: int


def licence_file(package: Package) -> Path | None:
    """The copyright file: that of the package, or of the one its documentation folder links to."""
    own = package.root / "usr/share/doc" / package.name / "copyright"
    others = sorted((package.root / "usr/share/doc").glob("*/copyright"))
    return own if own.is_file() else next(iter(others), None)


def _stanzas(text: str) -> list[dict[str, str]]:
    """Paragraphs of a machine-readable copyright file, each a mapping of fields."""
    found = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        fields = re.findall(r"^([A-Z][\w-]*):[ \t]*((?:.*\n?)(?:[ \t].*\n?)*)", paragraph, re.MULTILINE)
        found.append({name: value.rstrip() for name, value in fields})
    return found


def _unfold(body: str) -> str:
    lines = [line.strip() for line in body.strip().splitlines()]
    return "\n".join("" if line == "." else line for line in lines)


def licence_text(text: str, source: Source) -> str:
    """The licence's own words for the files used, as the copyright file has them."""
    if source.excerpt:
        start = text.find(source.excerpt[0])
        end = text.find(source.excerpt[1], start)
        return text[start : end + len(source.excerpt[1])] if start >= 0 and end >= 0 else ""
    stanzas = [stanza for stanza in _stanzas(text) if "License" in stanza]
    if not stanzas:
        return text.strip() if len(text) <= WHOLE_FILE else ""
    general = next((stanza for stanza in stanzas if stanza.get("Files", "").split()[:1] == ["*"]), stanzas[0])
    name, _, body = general["License"].partition("\n")
    names = [source.stanza] if source.stanza else [name, *re.split(r" (?:or|OR|and) ", name)]
    bodies = [body] if body.strip() and not source.stanza else []
    for stanza in stanzas:
        head, _, words = stanza["License"].partition("\n")
        if "Files" not in stanza and head.strip() in names and words.strip():
            bodies.append(words)
    return "\n\n".join(map(_unfold, bodies))


def part(source: Source, package: Package, texts: list[str], left_out: int) -> Part:
    """The manifest's row for ``source``, whose documents are ``texts``; ``left_out`` of its files were not read."""
    file = licence_file(package)
    words = licence_text(file.read_text(encoding="utf-8", errors="replace"), source) if file else ""
    return Part(
        package=source.package,
        version=package.version,
        domain=source.domain,
        licence=source.licence,
        notice=source.notice,
        licence_file=str(file.relative_to(package.root)) if file else "",
        licence_text=words,
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        left_out=left_out,
    )


def write_manifest(parts: list[Part], dropped: dict[str, int], path: Path) -> None:
    """``dropped``: held-out documents of each domain that were too like the training text."""
    values = {
        "distribution": "Debian 12",
        "heldout_dropped": dropped,
        "heldout_most_shared": MOST_SHARED,
        "sources": [asdict(row) for row in parts],
    }
    save_manifest(values, path)


def save_manifest(values: Mapping[str, Any], path: Path) -> None:
    text = json.dumps(values, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
