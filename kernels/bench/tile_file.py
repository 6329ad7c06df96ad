"""Reads and writes a GPU's tile table: one entry per line, sorted, so that a re-tuned shape is a small diff."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_kernels.tiles import Entry, load

Key = tuple[str, str, tuple[tuple[str, int], ...], int]


def key(entry: Entry) -> Key:
    return entry.op, entry.dtype, tuple(sorted(entry.shape)), entry.rows


def merged(old: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """New entries replace old ones of the same op, dtype, shape and rows."""
    entries = {key(entry): entry for entry in (*old, *new)}
    return [entries[at] for at in sorted(entries)]


def read(path: Path) -> tuple[Entry, ...]:
    """No file: no entries."""
    load.cache_clear()
    return load(path) if path.exists() else ()


def write(path: Path, device: str, entries: Iterable[Entry]) -> None:
    lines = ",\n".join(f"  {json.dumps(_document(entry))}" for entry in entries)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f'{{\n "device": {json.dumps(device)},\n "entries": [\n{lines}\n ]\n}}\n')
    # An interrupted tuner must not leave half a table behind.
    temporary.replace(path)


def _document(entry: Entry) -> Mapping[str, object]:
    fields = {"op": entry.op, "dtype": entry.dtype, "shape": dict(entry.shape), "rows": entry.rows}
    return {**fields, "tiles": dict(entry.tiles), "us": round(entry.us, 2)}
