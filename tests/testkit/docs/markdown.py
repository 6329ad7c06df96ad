"""One way to wrap Markdown: paragraphs and list items fill lines of 120 columns, everything else stays as it is.

    PYTHONPATH=tests python -m testkit.docs.markdown FILE...     (rewrites the files)

Tables, code, headings, HTML comments, what programs write between marks, and rows that are indented as code are left
alone. Words and short pieces of code are never broken, so a long address may stand out.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 120
_ITEM = re.compile(r"(\s*)([-*+]|\d+[.)])\s+(?=\S)")
_ALONE = re.compile(r"\s*(#|\||<|>|\[[^\]]+\]:\s|```|---\s*$|\*\*\*\s*$|    )")
_BEGIN, _END = re.compile(r"<!-- \w+:"), re.compile(r"<!-- /")
"""Marks of what a program writes."""
_CODE = re.compile(r"`[^`]{1,60}`")
_WOULD_BEGIN = re.compile(r"([-*+]|#+|>|\d+[.)])$")


def wrapped(text: str) -> str:
    """``text`` with its paragraphs and list items wrapped. Wrapping it again changes nothing."""
    return "\n".join(_lines(text.split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    at, fenced, made = 0, False, False
    while at < len(lines):
        line = lines[at]
        made = _BEGIN.match(line) is not None or (made and _END.match(line) is None)
        if line.lstrip().startswith("```"):
            fenced = not fenced
        item = _ITEM.match(line)
        if fenced or made or not line.strip() or (_ALONE.match(line) and not item):
            yield line
            at += 1
            continue
        first = item[0] if item else re.match(r"\s*", line)[0]  # type: ignore[index]
        rest = " " * len(first)
        paragraph, at = [line[len(first) :]], at + 1
        while at < len(lines) and _goes_on(lines[at]):
            paragraph.append(lines[at])
            at += 1
        text = " ".join(" ".join(paragraph).split())
        yield from _filled(_CODE.sub(lambda code: code[0].replace(" ", "\0"), text).split(" "), first, rest)


def _goes_on(line: str) -> bool:
    """Whether ``line`` belongs to the paragraph above."""
    return bool(line.strip()) and not _ITEM.match(line) and not re.match(r"\s*(#|\||<|>|```)", line)


def _filled(words: list[str], first: str, rest: str) -> Iterator[str]:
    """Words that would begin a list or a heading, were they first in a line, stay with the word before."""
    glued: list[str] = []
    for word in words:
        if glued and _WOULD_BEGIN.match(word):
            glued[-1] += f"\0{word}"
        else:
            glued.append(word)
    for line in textwrap.wrap(
        " ".join(glued), WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    ):  # fmt: skip
        yield line.replace("\0", " ")


def main() -> None:
    for name in sys.argv[1:]:
        file = Path(name)
        text = file.read_text(encoding="utf-8")
        if (new := wrapped(text)) != text:
            file.write_text(new, encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
