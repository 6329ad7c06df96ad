"""WordNet's entries in, headwords with senses out, and the text ``define: WORD`` that the model learns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pocket_moe.readers.text import normalise

PARTS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
MOST_SENSES = 10  # 'break' has 75; the later ones are rare
SENSES_WITH_EXAMPLE = 4

_SENSE = re.compile(r"^\s{4}(?:(n|v|adj|adv) )?(\d+): ")
_RELATED = re.compile(r"\s*\[(?:syn|ant|also): [^\]]*\]")
_LABEL = re.compile(r"^\(([a-zA-Z ,]{3,40})\)\s+(?=\S)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sense:
    """One meaning. ``gloss`` is the bare definition as WordNet has it: what must not cross the split."""

    part: str
    gloss: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A headword and its meanings, the most frequent first."""

    headword: str
    senses: tuple[Sense, ...]


def _sense(part: str, body: str) -> Sense:
    text = re.sub(r"`([^`']*)'", r"'\1'", normalise(_RELATED.sub("", body)))
    gloss, *examples = re.split(r'; (?=["`])', text)
    return Sense(part=part, gloss=gloss.strip(" ;:"), examples=tuple(example.strip(' ";') for example in examples))


def parse_entry(entry: str) -> Entry | None:
    """One entry of dict-wn; None for one without a meaning."""
    headword, *lines = entry.rstrip().split("\n")
    senses: list[tuple[str, str]] = []
    part = ""
    for line in lines:
        if match := _SENSE.match(line):
            part = PARTS[match[1]] if match[1] else part
            senses.append((part, line[match.end() :]))
        elif senses:
            senses[-1] = (senses[-1][0], f"{senses[-1][1]} {line.strip()}")
    parsed = tuple(sense for part, body in senses if (sense := _sense(part, body)).gloss)
    return Entry(headword=headword.strip(), senses=parsed) if parsed else None


def _sentence(text: str) -> str:
    """First letter capitalised, a full stop at the end."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _definition(sense: Sense, headword: str, with_example: bool) -> str:
    """``(noun, astrology) One of 12 equal areas.``: WordNet's subject label joins the part of speech."""
    label = _LABEL.match(sense.gloss)
    gloss = sense.gloss[label.end() :] if label else sense.gloss
    head = f"({sense.part}, {label[1]})" if label else f"({sense.part})"
    text = f"{head} {_sentence(gloss)}"
    example = next((example for example in sense.examples if shows(example, headword)), "")
    return f'{text} "{_sentence(example)}"' if with_example and example else text


def shows(example: str, headword: str) -> bool:
    """Whether an example has the headword: WordNet's are shared by synonyms. Endings may differ."""
    stem = headword.lower().split()[0].rstrip("ey")
    return re.search(rf"\b{re.escape(stem)}", example.lower()) is not None


def entry_text(entry: Entry) -> str:
    """``define: WORD`` and its meanings: one line, or numbered lines where there are several.

    >>> entry_text(Entry(headword="ferry", senses=(Sense(part="noun", gloss="a boat that transports people"),)))
    'define: ferry\\n(noun) A boat that transports people.'
    """
    lines = [
        _definition(sense, entry.headword, i < SENSES_WITH_EXAMPLE)
        for i, sense in enumerate(entry.senses[:MOST_SENSES])
    ]
    if len(lines) > 1:
        lines = [f"{i}. {line}" for i, line in enumerate(lines, 1)]
    return "\n".join([f"define: {entry.headword}", *lines])
