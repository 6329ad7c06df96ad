"""A day of load from a CSV file: a row for each minute.

Columns: minute, requests_per_s, prompt_tokens_mean, output_tokens_mean, and one for each topic with its share of the
requests; with no topic columns all requests are alike.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.errors import ConfigError

MINUTE, RATE, PROMPT, OUTPUT = REQUIRED = ("minute", "requests_per_s", "prompt_tokens_mean", "output_tokens_mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class Minute:
    """``topics``: share of the requests by topic, in the order of the trace's topics; they add up to 1."""

    number: int
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    topics: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    topics: tuple[str, ...]
    minutes: tuple[Minute, ...]


def read_trace(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        ConfigError: there is no such file, or a column or a value in it is not as it must be; names the line.
    """
    try:
        with path.expanduser().open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or f"it is no CSV file ({error})"
        raise ConfigError(f"Cannot read the trace {path}: {reason}.") from error
    header = [name.strip() for name in rows[0]] if rows else []
    lines = [(number, row) for number, row in enumerate(rows[1:], 2) if any(cell.strip() for cell in row)]
    _check_header(path, header)
    if not lines:
        raise ConfigError(f"The trace {path} has no rows.", hint="It needs one for each minute, below the header.")
    topics = tuple(name for name in header if name not in REQUIRED)
    minutes = [_minute(path, line, header, row, topics) for line, row in lines]
    for (line, _), earlier, later in zip(lines[1:], minutes, minutes[1:], strict=False):
        if later.number != earlier.number + 1:
            found = f"minute {later.number} comes after minute {earlier.number}"
            raise ConfigError(f"{path}, line {line}: {found}.", hint="Rows are minutes in order, none left out.")
    return Trace(topics=topics, minutes=tuple(minutes))


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise ConfigError(
            f"The trace {path} has no column {', '.join(missing)}.", hint=f"It needs {', '.join(REQUIRED)}."
        )
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"The trace {path} has the column {twice!r} twice.", hint="Name each column once.")
    if "" in header:
        raise ConfigError(
            f"The trace {path} has a column without a name.", hint="Columns of topics are named for them."
        )


def _minute(path: Path, line: int, header: Sequence[str], row: Sequence[str], topics: Sequence[str]) -> Minute:
    if len(row) != len(header):
        raise ConfigError(
            f"{path}, line {line}: {len(row)} values for {len(header)} columns.", hint="Is a comma missing?"
        )
    values = {name: _number(path, line, name, text) for name, text in zip(header, row, strict=True)}
    if values[MINUTE] != int(values[MINUTE]):
        raise ConfigError(f"{path}, line {line}: minute is {values[MINUTE]:g}; expected a whole number.")
    for name in (PROMPT, OUTPUT):
        if values[RATE] > 0 and values[name] < 1:
            raise ConfigError(f"{path}, line {line}: {name} is {values[name]:g}; expected at least 1.")
    shares = [values[topic] for topic in topics]
    total = sum(shares)
    if topics and values[RATE] > 0 and not 0.98 <= total <= 1.02:
        raise ConfigError(
            f"{path}, line {line}: the shares of the topics add up to {total:g}, not 1.",
            hint=f"Columns other than {', '.join(REQUIRED)} are taken for topics.",
        )
    return Minute(
        number=int(values[MINUTE]),
        requests_per_s=values[RATE],
        prompt_tokens=values[PROMPT],
        output_tokens=values[OUTPUT],
        topics=tuple(share / total if total else 1 / len(topics) for share in shares),
    )


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{path}, line {line}: {name} is {text.strip()!r}; expected a number of 0 or more.")
    return value
