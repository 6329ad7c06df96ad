"""One regular expression for many words, which reads a text once whatever it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable


def any_of(words: Iterable[str]) -> str:
    """An expression that matches where one of ``words`` begins; none of them may be empty.

    The words are laid out as a tree, so that at no place more characters are looked at than the longest word has.

    >>> any_of(["<|end|>", "<|eot|>", "<|end"])
    '<\\\\|e(?:nd(?:\\\\|>)?|ot\\\\|>)'
    """
    return _branches(sorted(set(words)), 0)


def _branches(words: list[str], depth: int) -> str:
    """What may follow the first ``depth`` characters, which ``words``, sorted, have in common."""
    ended = len(words[0]) == depth
    rest = words[1:] if ended else words
    if not rest:
        return ""
    first: dict[str, list[str]] = {}
    for word in rest:
        first.setdefault(word[depth], []).append(word)
    ways = [re.escape(char) + _branches(group, depth + 1) for char, group in first.items()]
    return f"(?:{'|'.join(ways)})?" if ended else ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
