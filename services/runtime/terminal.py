"""Text of others for a terminal, which must not obey it."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` in one line; what steers a terminal or turns the direction of writing is as Python writes it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
