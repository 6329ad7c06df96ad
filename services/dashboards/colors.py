"""Colours by Grafana's names, as variables of the page's style sheet, which has values for light and for dark."""

from __future__ import annotations

import re

_NAMES = ("green", "red", "blue", "orange", "yellow", "purple")
_SHADES = ("super-light-", "light-", "semi-dark-", "dark-")
_HEX = re.compile(r"#(?:[0-9a-fA-F]{3,4}){1,2}")
_SCHEME = {"Gr": "green", "Yl": "yellow", "Rd": "red", "Bl": "blue", "Pu": "purple", "Or": "orange"}
PALETTE = 12
"""Colours of series: ``--s0`` and on."""


def css(name: str) -> str:
    """Return ``name`` for a style; text's colour for one that is not known, so that nothing else gets into the page."""
    base = name
    for shade in _SHADES:
        base = base.removeprefix(shade)
    if base in _NAMES:
        return f"var(--{base})"
    if _HEX.fullmatch(name):
        return name
    return "transparent" if name == "transparent" else "var(--text)"


def between(scheme: str, share: float) -> str:
    """Return the colour at ``share`` of a scheme such as ``GrYlRd``, from its first colour to its last."""
    stops = [_SCHEME.get(part, "blue") for part in re.findall("[A-Z][a-z]", scheme)] or ["blue", "red"]
    at = share * (len(stops) - 1)
    left = min(int(at), len(stops) - 1)
    right = min(left + 1, len(stops) - 1)
    return f"color-mix(in srgb, var(--{stops[right]}) {100 * (at - left):.0f}%, var(--{stops[left]}))"


def of_series(number: int) -> str:
    """Return the colour of a panel's series, counted from 0."""
    return f"var(--s{number % PALETTE})"
