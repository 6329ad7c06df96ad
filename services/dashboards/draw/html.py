"""Elements of HTML and SVG. What is not made here is text, and escaped: names of series are other people's words."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float | None) -> Html:
    """Return ``<name attributes>children</name>``. Children that are not :class:`Html` are escaped.

    Attributes of None are left out. Underlines in their names are dashes, one at the end keeps them from being words of
    Python: ``class_="a", stroke_width=2``.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Return ``parts`` one after the other, escaped where they are text."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """Return a coordinate with at most one decimal: a tenth of a thousandth of a picture."""
    written = f"{value:.1f}"
    return written.removesuffix(".0").replace("-0", "0") if written in ("-0.0", "0.0") else written.removesuffix(".0")


def document(title: str, *body: Html, styles: Iterable[Path], head: str = "") -> str:
    """Return a page that needs no other file: ``styles`` are in it. ``head`` is markup for the head."""
    style = "".join(file.read_text(encoding="utf-8") for file in styles)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{head}'
        f"{element('title', title)}<style>\n{style}</style></head>\n"
        f"<body>{join(body)}</body></html>\n"
    )


SIZE = 1000.0
"""Width and height of a plot in its own coordinates. It is stretched over the room that it has; text is beside it."""


def plot(*children: str) -> Html:
    """Return a picture that fills its box; strokes keep their width (`vector-effect` in the style sheet)."""
    return element(
        "svg", *children, class_="fill", viewBox=f"0 0 {SIZE:.0f} {SIZE:.0f}", preserveAspectRatio="none", role="img"
    )


def css_percent(share: float) -> str:
    """Return a share of a box for a style."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"
