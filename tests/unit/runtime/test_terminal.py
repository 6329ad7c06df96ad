"""Text that would steer a terminal is shown, not obeyed."""

from __future__ import annotations

import pytest

from services.runtime import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, grün, 漢字 \\", "plain, grün, 漢字 \\"),
        ("a\x1b[2J\x1b]0;title\x07", "a\\x1b[2J\\x1b]0;title\\x07"),
        ("one\r\ntenant  mallory\t", "one\\r\\ntenant  mallory\\t"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("abc\u202egnp.exe\u2028", "abc\\u202egnp.exe\\u2028"),
    ],
)
def test_what_steers_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
