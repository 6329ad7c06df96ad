"""A page of HTML documentation in, blocks of readable text out: the main part alone, without navigation or tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

from pocket_moe.readers.text import FORMULA, Block, sections

SKIPPED_TAGS = frozenset(
    """
    script style nav aside footer button svg form select table math noscript iframe object template
    """.split()  # noqa: SIM905 - a list would be a page long
)
SKIPPED_CLASSES = frozenset(
    """
    headerlink toc contents sidebar navheader navfooter toctree-wrapper related sphinxsidebar src srclink
    nav-wrapper nav-wide-wrapper viewcode-link math versionmodified anchor item-info out-of-band since
    notable-traits playground highlight-output output_area nboutput footnote footnote-list brackets bottomlang
    toplang page-nav sidetoc toctitle topnav tip-example-toggle api_metadata type-signature funclabel linenos gp
    go sectnum num secno indexterm section-number synopsis refsynopsisdiv function_sig code-attribute rightarrow
    since-version stab sphx-glr-download sphx-glr-timing sphx-glr-footer sphx-glr-thumbcontainer
    sphx-glr-script-out sphx-glr-signature copyright prompt doc-header mark nosearch tagline
    sphx-glr-download-link-note versionchanged versionadded versionremoved deprecated item-table
    """.split()  # noqa: SIM905 - a list would be a page long
)
SKIPPED_IDS = frozenset(  # of rustdoc's pages: methods of traits, which every type repeats
    (
        *("trait-implementations-list", "synthetic-implementations-list", "blanket-implementations-list"),
        *("trait-implementations", "synthetic-implementations", "blanket-implementations"),
        *("implementors-list", "foreign-impls"),
    )
)
HEADINGS = {f"h{level}": level for level in range(1, 7)}
BREAKS = frozenset(
    [
        "p",
        "div",
        "section",
        "article",
        "main",
        "header",
        "ul",
        "ol",
        "dl",
        "dd",
        "blockquote",
        "li",
        "dt",
        "pre",
        "td",
        "tr",
        "br",
        "hr",
        "figure",
        "figcaption",
        "details",
        "summary",
    ]
)
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
NUMBERED = re.compile(r"^(?:[A-Z0-9]+(?:\.\d+)*\.?|Chapter \d+\.|Appendix [A-Z]\.)\s+(?=[A-Z])")


class _Page(HTMLParser):
    """Collects blocks. Of nested elements it follows only the skipped one and the main one, so that unclosed tags,
    which hand-written pages are full of, cannot derail it."""

    def __init__(self, main: str) -> None:
        super().__init__(convert_charrefs=True)
        name, _, value = main.partition("=")
        self._main = (name, value)
        self._inside = not main
        self._main_tag, self._main_depth = "", 0
        self._skip_tag, self._skip_depth = "", 0
        self._title_open = False
        self._kind, self._level = "text", 0
        self._text: list[str] = []
        self.title = ""
        self.blocks: list[Block] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip_tag:
            self._skip_depth += tag == self._skip_tag
            return
        values = {name: value or "" for name, value in attrs}
        self._title_open = tag == "title"
        if not self._inside:
            self._enter(tag, values)
        elif tag == self._main_tag:
            self._main_depth += 1
        if tag in VOID:
            self._break(tag)
        elif self._is_skipped(tag, values):
            self._skip_tag, self._skip_depth = tag, 1
            if tag == "math" or "math" in values.get("class", "").split():
                self._text.append(FORMULA)
        else:
            self._open(tag)
        if "classifier" in values.get("class", ""):
            self._text.append(": ")

    def _enter(self, tag: str, values: dict[str, str]) -> None:
        name, value = self._main
        is_main = tag == name if not value else value in values.get(name, "").split()
        if is_main:
            self._inside, self._main_tag, self._main_depth = True, tag, 1

    def _is_skipped(self, tag: str, values: dict[str, str]) -> bool:
        classes = values.get("class", "").split()
        return tag in SKIPPED_TAGS or values.get("id") in SKIPPED_IDS or bool(SKIPPED_CLASSES.intersection(classes))

    def _break(self, tag: str) -> None:
        if tag == "br" and self._kind == "code":
            self._text.append("\n")
        elif tag == "br":
            self._text.append(" ")
        elif tag == "hr":
            self._flush()

    def _open(self, tag: str) -> None:
        if tag in HEADINGS:
            self._start("heading", HEADINGS[tag])
        elif tag == "li":
            self._start("item")
        elif tag == "dt":
            self._start("term")
        elif tag == "pre":
            self._start("code")
        elif tag in BREAKS:
            # A paragraph that opens a list's item is still the item.
            self._start("item" if self._kind == "item" and not "".join(self._text).strip() else "text")

    def _start(self, kind: str, level: int = 0) -> None:
        self._flush()
        self._kind, self._level = kind, level

    def handle_endtag(self, tag: str) -> None:
        if self._skip_tag:
            self._skip_depth -= tag == self._skip_tag
            if not self._skip_depth:
                self._skip_tag = ""
            return
        if tag in HEADINGS or tag in BREAKS:
            self._start("text")
        if tag == self._main_tag:
            self._main_depth -= 1
            self._inside = self._main_depth > 0

    def handle_data(self, data: str) -> None:
        if self._title_open:
            self.title += data
            self._title_open = False
        elif self._inside and not self._skip_tag:
            self._text.append(data)

    def _flush(self) -> None:
        text = "".join(self._text)
        if text.strip():
            if self._kind == "heading":
                text = NUMBERED.sub("", " ".join(text.split()))
            self.blocks.append(Block(kind=self._kind, text=text, level=self._level))
            self._text.clear()
            return
        self._text.clear()

    def close(self) -> None:
        super().close()
        self._flush()


def html_documents(page: str, main: str) -> Iterator[str]:
    """Documents of a page. ``main`` names the element that holds its text: ``role=main``, ``id=content``, a tag's name;
    empty for the whole body."""
    parser = _Page(main)
    parser.feed(page)
    parser.close()
    return sections(parser.blocks, _page_title(parser.title))


def _page_title(text: str) -> str:
    """A page's title without its chapter's number and the name of the whole documentation."""
    line = " ".join(text.split()).removeprefix("Erlang -- ")
    return re.split(r" [—|–] | - | » | in (?:std|core|alloc)\b", NUMBERED.sub("", line))[0]
