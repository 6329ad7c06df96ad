"""Makes text from elsewhere safe to print: a terminal must not obey it."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` in one line, with characters that steer a terminal or turn the writing direction escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
