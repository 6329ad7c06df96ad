"""The dictionary server's format in (``.index`` and dictzip'd ``.dict.dz``, see dictd(8)), raw entries out."""

from __future__ import annotations

import gzip
import string
from pathlib import Path

from pocket_moe.errors import PocketError

_DIGITS = {digit: value for value, digit in enumerate(string.ascii_uppercase + string.ascii_lowercase + "0123456789+/")}


def number(digits: str) -> int:
    """The index's base-64 numbers, most significant digit first. ``number("Bl") == 101``."""
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS[digit]
    return value


def read_dictd(index: Path) -> list[str]:
    """The entries of a dictionary, in the order of its file, without those that describe the database.

    Raises:
        PocketError: the file is not such a dictionary.
    """
    try:
        data = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
        rows = [line.split("\t") for line in index.read_text(encoding="utf-8").splitlines() if line]
        places = {(number(row[1]), number(row[2])) for row in rows if not row[0].startswith("00")}
    except (OSError, EOFError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise PocketError(
            f"{index} is not a dictionary: {error!r}", hint="Delete its package's folder and run data.py again."
        ) from error
    return [data[start : start + size].decode("utf-8", "replace") for start, size in sorted(places)]
