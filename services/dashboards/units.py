"""Numbers with their units, by the names that Grafana has for these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_SI = ((1e-9, "n"), (1e-6, "µ"), (1e-3, "m"), (1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"))
_COUNT = ((1.0, ""), (1e3, "K"), (1e6, "Mil"), (1e9, "Bil"), (1e12, "Tri"))
_BINARY = tuple((float(1 << 10 * power), prefix) for power, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi")))
_TIME = (
    (1e-9, " ns"),
    (1e-6, " µs"),
    (1e-3, " ms"),
    (1.0, " s"),
    (60.0, " min"),
    (3600.0, " h"),
    (86400.0, " d"),
    (7 * 86400.0, " w"),
    (365 * 86400.0, " y"),
)
_TIMES: Mapping[str, float] = {
    "ns": 1e-9,
    "µs": 1e-6,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_BYTES: Mapping[str, tuple[float, Sequence[tuple[float, str]], str]] = {
    "bytes": (1, _BINARY, "B"),
    "kbytes": (1024, _BINARY, "B"),
    "mbytes": (1 << 20, _BINARY, "B"),
    "gbytes": (1 << 30, _BINARY, "B"),
    "decbytes": (1, _SI, "B"),
    "bits": (1, _BINARY, "b"),
    "decbits": (1, _SI, "b"),
    "binBps": (1, _BINARY, "B/s"),
    "Bps": (1, _SI, "B/s"),
    "binbps": (1, _BINARY, "b/s"),
    "bps": (1, _SI, "b/s"),
    "KiBs": (1024, _BINARY, "B/s"),
    "KBs": (1e3, _SI, "B/s"),
    "MiBs": (1 << 20, _BINARY, "B/s"),
    "MBs": (1e6, _SI, "B/s"),
}
_RATES = {
    "cps": "c/s",
    "ops": "ops/s",
    "reqps": "req/s",
    "rps": "rd/s",
    "wps": "wr/s",
    "iops": "io/s",
    "eps": "evt/s",
    "mps": "msg/s",
    "cpm": "c/m",
    "opm": "ops/m",
    "reqpm": "req/m",
}
_WITH_PREFIX = {"hertz": "Hz", "watt": "W", "joule": "J", "volt": "V", "amp": "A"}
_FIXED = {"celsius": "°C", "fahrenheit": "°F", "rotrpm": "rpm", "multiplier": "x"}
_DIGITS = 3
"""Digits of a number for which the dashboard sets no decimals."""


def text(value: float, unit: str, decimals: int | None = None) -> str:
    """Return ``value`` as people read it, such as ``1.5 GiB`` for 1610612736 and ``bytes``."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit in ("", "none", "short", "sishort"):
        return _scaled(
            value, _COUNT if unit == "short" else _SI if unit == "sishort" else _COUNT[:1], decimals, " "
        ).strip()
    if unit in ("percent", "percentunit"):
        return f"{_number(value * (100 if unit == 'percentunit' else 1), decimals)} %".replace(" %", "%")
    if unit in _TIMES:
        return _time(value * _TIMES[unit], decimals)
    if unit in ("dtdurations", "clocks"):
        return _time(value, decimals)
    if unit in _BYTES:
        factor, prefixes, symbol = _BYTES[unit]
        return _scaled(
            value * factor, [(size, f" {prefix}{symbol}") for size, prefix in prefixes if size >= 1], decimals
        )
    return _with_word(value, unit, decimals)


def _with_word(value: float, unit: str, decimals: int | None) -> str:
    if unit in _RATES:
        return f"{_scaled(value, _COUNT, decimals, ' ').strip()} {_RATES[unit]}"
    if unit in _WITH_PREFIX:
        symbol = _WITH_PREFIX[unit]
        return _scaled(value, [(size, f" {prefix}{symbol}") for size, prefix in _SI], decimals)
    if unit == "bool":
        return "True" if value else "False"
    if unit in ("bool_yes_no", "bool_on_off"):
        yes, no = ("Yes", "No") if unit == "bool_yes_no" else ("On", "Off")
        return yes if value else no
    if unit == "locale":
        return f"{value:,.{decimals or 0}f}"
    kind, colon, word = unit.partition(":")
    if colon and kind in ("si", "counts"):
        return _scaled(value, [(size, f" {prefix}{word}") for size, prefix in _SI if size >= 1], decimals)
    if colon and kind == "prefix":
        return f"{word} {_number(value, decimals)}"
    word = word if colon and kind == "suffix" else _FIXED.get(unit, unit)
    return f"{_scaled(value, _COUNT, decimals, ' ').strip()} {word.strip()}"


def _time(value_s: float, decimals: int | None) -> str:
    return "0 s" if value_s == 0 else _scaled(value_s, _TIME, decimals)


def _scaled(value: float, scale: Sequence[tuple[float, str]], decimals: int | None, gap: str = "") -> str:
    """Return ``value`` in the largest unit of ``scale`` (sizes with what is written behind) in which it is 1 or more.

    A value that rounds up to the next unit is written in that one.
    """
    size, suffix = scale[0] if abs(value) < scale[0][0] and value else next(iter(scale))
    for candidate, name in scale:
        if float(f"{abs(value) / candidate:.{_DIGITS}g}") >= 1:
            size, suffix = candidate, name
    if value == 0:
        size, suffix = next(((each, name) for each, name in scale if each == 1), scale[0])
    return f"{_number(value / size, decimals)}{gap}{suffix}"


def _number(value: float, decimals: int | None) -> str:
    """Return ``value`` with that many decimals; None: with three digits, and without zeros at the end."""
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if value == 0:
        return "0"
    if abs(value) >= 10**_DIGITS:
        return f"{value:.0f}"
    written = f"{value:.{_DIGITS}g}"
    return f"{float(written):.10f}".rstrip("0").rstrip(".") if "e" in written and abs(value) > 1e-6 else written
