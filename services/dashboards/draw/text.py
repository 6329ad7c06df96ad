"""Text panels: the part of Markdown that notes of a dashboard use. Markup in them is shown as it is typed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.dashboards.draw.html import Html, element, join

_INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\[([^\]]+)\]\(([^)\s]+)\)")
_LINK = re.compile(r"(https?://|/|#|\.)", re.I)


def markdown(text: str) -> Html:
    """Return headings, lists, code and paragraphs of ``text``."""
    return element("div", *(_block(kind, lines) for kind, lines in _blocks(text)), class_="text")


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what is one block: its kind and its lines."""
    kind, lines, in_code = "p", list[str](), False
    for line in [*text.strip().splitlines(), ""]:
        if line.startswith("```"):
            if lines:
                yield ("pre" if in_code else kind), lines
            lines, in_code, kind = [], not in_code, "p"
            continue
        now = "pre" if in_code else _kind(line)
        if lines and (now != kind or now == "heading" or not line.strip()) and not in_code:
            yield kind, lines
            lines = []
        kind = now
        if in_code or line.strip():
            lines.append(line)
    if lines:
        yield kind, lines


def _kind(line: str) -> str:
    if line.startswith("#"):
        return "heading"
    return "list" if re.match(r"\s*[-*] ", line) else "p"


def _block(kind: str, lines: list[str]) -> Html:
    if kind == "heading":
        return element("h4", inline(lines[0].lstrip("# ")))
    if kind == "list":
        return element("ul", *(element("li", inline(re.sub(r"^\s*[-*] ", "", line))) for line in lines))
    if kind == "pre":
        return element("pre", "\n".join(lines))
    return element("p", inline(" ".join(lines)))


def inline(text: str) -> Html:
    """Return ``text`` with code, bold words and links. A link leads to a page, never to a script."""
    parts: list[str] = []
    end = 0
    for match in _INLINE.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        code, bold, label, target = match.groups()
        if code is not None:
            parts.append(element("code", code))
        elif bold is not None:
            parts.append(element("b", bold))
        else:
            parts.append(element("a", label, href=target) if _LINK.match(target) else match[0])
    return join([*parts, text[end:]])
