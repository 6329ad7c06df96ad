"""One regular expression for many words. It reads any text in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable


def any_of(words: Iterable[str]) -> str:
    """Returns an expression that matches any of ``words``; no word may be empty.

    The words form a tree, so that matching at a place reads at most as many characters as the longest word has.

    >>> any_of(["<|end|>", "<|eot|>", "<|end"])
    '<\\\\|e(?:nd(?:\\\\|>)?|ot\\\\|>)'
    """
    return _branches(sorted(set(words)), 0)


def _branches(words: list[str], depth: int) -> str:
    """Returns an expression for the rest of ``words``, which are sorted and share the first ``depth`` characters."""
    ended = len(words[0]) == depth
    rest = words[1:] if ended else words
    if not rest:
        return ""
    first: dict[str, list[str]] = {}
    for word in rest:
        first.setdefault(word[depth], []).append(word)
    ways = [re.escape(char) + _branches(group, depth + 1) for char, group in first.items()]
    return f"(?:{'|'.join(ways)})?" if ended else ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
