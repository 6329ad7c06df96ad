"""What a reader makes of a file: blocks of text (headings, paragraphs, items, code), and documents cut from them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FORMULA = "\0"  # readers put it where a formula was: the sentence around it is of no use
SECTION_CHARS = 1500  # a document closes at the first heading after this many
LONGEST_CHARS = 8000  # a section beyond this goes on in a further document under the same title
SHORTEST_CHARS = 300
CODE_LINES, CODE_CHARS = 6, 360  # longer listings are left out: the model is to learn prose
MOST_DIGITS = 0.05  # more of them make a list of versions
PLAIN_SHARE = 0.86  # letters and spaces in a paragraph of prose; tables and signatures have fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One training document. ``id`` is ``<package>:<path or headword>``, unique within its domain."""

    id: str
    domain: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A piece of a page. ``kind``: heading, text, item, term or code; ``level`` is that of a heading, 1 the page's."""

    kind: str
    text: str
    level: int = 0


_SPACES = re.compile(r"\s+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2028-\u202e\u2060\ufeff¶]")
_MATH = re.compile(r"\\[()\[\]]")


def normalise(text: str) -> str:
    """One line of clean text: composed characters, single spaces, nothing invisible, no marks of formulas."""
    return _SPACES.sub(" ", _MATH.sub("", _INVISIBLE.sub("", unicodedata.normalize("NFC", text)))).strip()


def unwrap(text: str) -> str:
    """Paragraphs of ``text`` on one line each, separated by an empty line."""
    return "\n\n".join(normalise(part) for part in re.split(r"\n\s*\n", text) if part.strip())


def is_prose(text: str) -> bool:
    """Whether ``text`` reads as English sentences and not as a table, a signature or a formula."""
    if FORMULA in text or text.count("\\") > 2 or len(text.split()) < 4:
        return False
    plain = sum(character.isalpha() or character in " .,'’" for character in text)
    latin = sum(character.isascii() for character in text)
    return plain >= PLAIN_SHARE * len(text) and latin >= 0.9 * len(text)


def _clean_code(text: str) -> str:
    lines = [line.rstrip() for line in text.expandtabs(4).strip("\n").splitlines()]
    if not lines or len(lines) > CODE_LINES or sum(map(len, lines)) > CODE_CHARS:
        return ""
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join("    " + line[margin:] for line in lines if line.strip())


def render(block: Block) -> str:
    """A block's text as it stands in a document; empty where it is not worth keeping."""
    if block.kind == "code":
        return _clean_code(block.text)
    text = normalise(block.text)
    if block.kind == "heading":
        return _heading(text)
    if block.kind == "term":
        return text if len(text) <= 100 else ""
    if not is_prose(text):
        return ""
    return f"- {text}" if block.kind == "item" else text


def _heading(text: str) -> str:
    """Of a Rust signature the function's name; no other signature, and nothing long."""
    if match := re.match(r"(?:pub |const |unsafe |async )*fn (\w+)", text):
        return match[1]
    return "" if len(text) > 100 or FORMULA in text or text.startswith(("impl<", "impl ", "type ")) else text


def _cut_promise(text: str) -> str:
    """``text`` without its last sentence where that ends in a colon and what it announces was left out."""
    if not text.endswith(":"):
        return text
    kept = re.match(r"(?s)(.*[.!?])\s+\S.*:$", text)
    return kept[1] if kept else ""


def _drop_danglers(parts: list[tuple[str, str]]) -> list[str]:
    """Without headings, terms and 'as follows:' that nothing follows, and without listings that nothing introduces."""
    kept: list[tuple[str, str]] = []
    for kind, text in parts:
        while kept and kept[-1][0] == "heading" and kind == "heading":
            kept.pop()
        while kept and kept[-1][0] == "term" and kind != "text":
            kept.pop()
        if kind == "code" and not (kept and kept[-1][0] in ("text", "item")):
            continue
        if kind in ("text", "heading") and kept and kept[-1][0] in ("text", "item"):
            kept[-1] = (kept[-1][0], _cut_promise(kept[-1][1]))
            kept = kept if kept[-1][1] else kept[:-1]
        kept.append((kind, text))
    while kept and (kept[-1][0] in ("heading", "term") or kept[-1][1].endswith(":")):
        kept.pop()
    return [text for _, text in kept]


def _join(parts: list[str]) -> str:
    """Items of a list follow one another on single lines, all else is set apart by an empty line."""
    text = ""
    for part in parts:
        single = part.startswith("- ") and text.rsplit("\n", 1)[-1].startswith("- ")
        text += ("" if not text else "\n" if single else "\n\n") + part
    return text


def sections(blocks: Iterable[Block], title: str) -> Iterator[str]:
    """Documents ``Title\\n\\ntext`` of one page: cut at headings, not too small and not too large."""
    parts: list[tuple[str, str]] = []
    size = 0
    heading = title
    for block in blocks:
        text = render(block)
        if not text:
            continue
        is_cut = block.kind == "heading" and block.level <= 3 and size >= SECTION_CHARS
        if is_cut or size >= LONGEST_CHARS:
            yield from _document(heading, parts)
            parts, size = [], 0
        if block.kind == "heading" and not parts:
            heading = text if not title or title.lower() in text.lower() else f"{title}: {text}"
            continue
        parts.append((block.kind, text))
        size += len(text)
    yield from _document(heading, parts)


def _document(title: str, parts: list[tuple[str, str]]) -> Iterator[str]:
    body = _drop_danglers([part for part in parts if part != ("heading", title)])
    prose = sum(len(text) for text in body if not text.startswith("    "))
    digits = sum(character.isdigit() for text in body for character in text)
    if prose >= SHORTEST_CHARS and digits <= MOST_DIGITS * prose and title:
        yield _join([normalise(title), *body])
