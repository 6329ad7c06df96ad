"""The small dictionaries in (The Devil's Dictionary, the Jargon File, the elements), ``verb: HEADWORD`` texts out."""

from __future__ import annotations

import re

from pocket_moe.readers.text import normalise

PARTS = {
    "n": "noun",
    "v": "verb",
    "v.t": "verb",
    "v.i": "verb",
    "vt": "verb",
    "vi": "verb",
    "adj": "adjective",
    "adv": "adverb",
    "pro": "pronoun",
    "pp": "participle",
    "p.p": "participle",
    "x": "adjective",
    "interj": "interjection",
    "excl": "exclamation",
    "prep": "preposition",
    "prov": "proverb",
    "suff": "suffix",
    "pref": "prefix",
    "infix": "infix",
    "obs": "obsolete",
}
_DEVIL = re.compile(
    r"^([A-Z][A-Z' .,-]*?)(?:, ([a-z.]+?)\.?)?(?:\.|,)?\s{2,}(?=\S)|^([A-Z][A-Z' -]+)\.\s*$", re.MULTILINE
)
_PRONOUNCED = re.compile(r"/[^/\n]+/(?: \([^)]*\))?")
HEAVIEST = 103  # the texts of the elements beyond come from an encyclopedia under a share-alike licence


def _paragraphs(text: str) -> list[str]:
    """Paragraphs on one line each; verse, which is indented, keeps its lines."""
    parts = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    return [_verse(part) if part.startswith("    ") else normalise(part) for part in parts]


def _verse(part: str) -> str:
    lines = [normalise(line) for line in part.splitlines()]
    return "\n".join(line for line in lines if line)


def devil_text(entry: str) -> tuple[str, str] | None:
    """(headword, text) of an entry such as ``ABATIS, n.  Rubbish in front of a fort``."""
    match = _DEVIL.match(entry)
    if not match:
        return None
    headword = (match[1] or match[3]).strip(" .,").lower()
    body = _paragraphs(_signed(entry[match.end() :]))
    if not body or not headword:
        return None
    part = PARTS.get((match[2] or "").strip("."))
    return headword, f"define (devil): {headword}\n{f'({part}) ' if part else ''}" + "\n".join(body)


def _signed(text: str) -> str:
    """Without the initials and names, set far to the right, of the invented poets."""
    return re.sub(r"^\s{24,}\S.*$", "", text, flags=re.MULTILINE)


def _part_of_speech(line: str) -> tuple[str, str] | None:
    """``(noun) `` for a line such as ``/@·breev'/, n.``; the pronunciation is dropped. None for any other line."""
    rest = _PRONOUNCED.sub("", line).replace("//", "").strip(" ,")
    names = [PARTS.get(name.strip(" .")) for name in re.split(r"[,;&/]| and ", rest) if name.strip(" .")]
    if any(name is None for name in names):
        return None
    return (f"({', '.join(dict.fromkeys(name for name in names if name))}) " if names else ""), ""


def jargon_text(entry: str) -> tuple[str, str] | None:
    """(headword, text) of an entry of the Jargon File, without its pronunciation and cross-reference braces."""
    headword, _, rest = entry.strip().partition("\n")
    first, _, body = rest.partition("\n")
    part = _part_of_speech(first)
    if part is None:
        is_short = first.startswith((" /", " \\")) and len(first) < 60
        part, body = ("", ""), body if is_short else rest
    plain = re.sub(r"\{\s*([^{}]*?)\s*\}", lambda match: " ".join(match[1].split()), body)
    paragraphs = [normalise(text) for text in re.split(r"\n\s*\n", plain) if len(text.strip()) > 3]
    if not paragraphs or len(headword) > 60:
        return None
    return headword.strip(), f"jargon: {headword.strip()}\n{part[0]}" + "\n".join(paragraphs)


def element_text(entry: str) -> tuple[str, str] | None:
    """(name, text) of an element up to lawrencium, with its symbol, number and weight in a sentence."""
    name, *lines = entry.strip().splitlines()
    facts = dict(line.split(": ", 1) for line in lines if re.match(r"(Symbol|Atomic number|Atomic weight): ", line))
    prose = normalise(" ".join(line for line in lines if not re.match(r"[A-Z][a-z]*( [a-z]+)?: ", line)))
    prose = re.sub(r"[{}]", "", prose)
    number = facts.get("Atomic number", "")
    if not number.isdigit() or int(number) > HEAVIEST or len(facts) < 3 or not prose:
        return None
    sentence = f"Symbol {facts['Symbol']}, atomic number {number}, atomic weight {facts['Atomic weight']}."
    return name.strip(), f"element: {name.strip()}\n{sentence} {prose}"
