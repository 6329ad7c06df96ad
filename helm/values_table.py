"""The chart's values as values.yaml documents them, and the tables of them in the chart's README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

PODS = ("gateway", "scheduler", "attention", "experts", "redis", "model.pvc.prefetch", "loadgen", "test")
"""Values that describe pods: the workloads, the Jobs that fetch the model and send load, and the pod of `helm test`."""
OWNERS = (
    *PODS,
    *("images.control", "images.worker", "images.redis", "model.image", "fabric"),
    *("autoscaling.experts", "autoscaling.attention", "autoscaling.gateway"),
    *("metrics.podMonitor", "metrics.prometheusRule", "tracing"),
)
"""Values whose parts may share a row of the table."""
_LONG = 150
"""Characters of a default beyond which the table refers to values.yaml."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One documented value: its dotted path, default, description and, where given, its schema."""

    path: tuple[str, ...]
    default: Any
    description: str
    schema: dict[str, Any] | None


def documented(text: str) -> Iterator[Value]:
    """The values of ``text`` that have a description, in order."""
    defaults = yaml.safe_load(text)
    path: list[str] = []
    description, schema = "", None
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("# --"):
            description = words.removeprefix("# --").strip()
        elif words.startswith("# @schema"):
            schema = json.loads(words.removeprefix("# @schema"))
        elif key := re.match(r"( *)([A-Za-z0-9]+):", line):
            path[len(key[1]) // 2 :] = [key[2]]
            if description:
                yield Value(path=tuple(path), default=_at(defaults, path), description=description, schema=schema)
            description, schema = "", None


def _at(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values


def table(values: list[Value]) -> str:
    """Two tables: the values that stand alone, then those that several owners have with one default and description."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for value in values:
        owner, name = _owner(value)
        if owner:
            shared.setdefault((name, _default(value), value.description), []).append(owner)
    shared = {row: owners for row, owners in shared.items() if len(owners) > 1}
    alone = [value for value in values if (_owner(value)[1], _default(value), value.description) not in shared]
    return "\n".join(
        [
            *("| value | default | |", "| --- | --- | --- |"),
            *(_row(f"`{'.'.join(value.path)}`", _default(value), value.description) for value in alone),
            *("", "| value | of | default | |", "| --- | --- | --- | --- |"),
            *(_row(f"`{row[0]}`", _owners(owners), *row[1:]) for row, owners in shared.items()),
        ]
    )


def _owner(value: Value) -> tuple[str, str]:
    """Which of :data:`OWNERS` has ``value``, if any, and the value's path below it."""
    path = ".".join(value.path)
    owner = next((owner for owner in OWNERS if path.startswith(f"{owner}.")), "")
    return owner, path.removeprefix(f"{owner}.")


def _owners(owners: list[str]) -> str:
    """``owners`` in words, by what is missing where that is shorter."""
    missing = [pod for pod in PODS if pod not in owners]
    if len(missing) > 2 or not set(owners) <= set(PODS):
        return ", ".join(owners)
    return f"all but {', '.join(missing)}" if missing else "all"


def _default(value: Value) -> str:
    default = json.dumps(value.default, ensure_ascii=False)
    return f"`{default}`" if len(default) <= _LONG else "[values.yaml](values.yaml)"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
