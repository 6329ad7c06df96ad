"""Which tile sizes a kernel is launched with: a JSON table per GPU in ``tiles/``, filled by ``python -m bench.tune``.

Pure policy: no torch, no triton. In: an op's name, its shape, its rows. Out: the launch's keyword arguments.

A file holds ``{"device": ..., "entries": [{"op", "dtype", "shape", "rows", "tiles"}, ...]}``. ``default.json`` serves
GPUs without a file of their own and ops that theirs lacks; it also declares the ops and which arguments each takes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

DIRECTORY: Final = Path(__file__).with_name("tiles")
DEFAULT: Final = "default"
STAND_IN: Final = {
    "fp16": "bf16", "int4_channel": "int4", "int8_channel": "int8", "int4_mixed": "int4", "int8_mixed": "int8",
    "mxfp4": "int4", "fp8": "int8",
}  # fmt: skip
"""A dtype without entries takes those of one that moves as many bytes through the same kernel."""
MISSING_KEY: Final = 1.0
"""Distance of a dimension that only one side names: as far as a factor of two."""
HALF_THE_OPERANDS: Final = 16.0
"""Distance from gated experts to an entry of plain ones: their blocks would take twice the room."""

_log = logging.getLogger(__name__)
Shape = tuple[tuple[str, int], ...]


class TileTableError(ValueError):
    """A table's file is broken. The message names the file, the entry and what is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """``tiles`` were the fastest for ``op`` at ``shape`` and ``rows``. ``us``: how fast, 0 if not measured."""

    op: str
    dtype: str
    shape: Shape
    rows: int
    tiles: Mapping[str, int]
    us: float = 0.0


def tiles(
    op: str, *, shape: Mapping[str, int], rows: int, dtype: str, device_name: str | None = None
) -> Mapping[str, int]:
    """The keyword arguments to launch ``op`` with.

    The entry of the same shape with the nearest rows; for an unknown shape the nearest over all dimensions and rows
    together, by the sum of ``|log2(wanted / entry's)|``. The first of equally near ones in the file's order. Gated
    experts ("gated" 2) take an entry of plain ones only if there is no other.

    Args:
        op: a name that ``default.json`` declares, e.g. "small.in".
        shape: the dimensions that the op is tuned over, e.g. d, f, E, k. Positive.
        rows: tokens (or pairs) of the call. 0 counts as 1.
        dtype: of the weights: "bf16", "fp16", "fp32", "int8", "int4", "int4_channel", "int4_mixed", "mxfp4", "fp8"...
        device_name: as ``torch.cuda.get_device_name()`` says it; None: the default entries.

    Raises:
        TileTableError: a file is broken, or no file knows ``op``.

    Example: entries for d = 2048 at rows 8 and 32. d = 2048, rows 12 takes rows 8 (0.58 against 1.42); d = 4096, rows
    32 takes 32, at distance 1.
    """
    forced = _overrides.get()
    if forced is not None and op in forced:
        return forced[op]
    return _lookup(op, dtype, device_name, rows, tuple(shape.items()))


@contextmanager
def overridden(choices: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """The named ops take these tiles in this thread and task: how the tuner tries candidates, and tests odd sizes."""
    token = _overrides.set({**(_overrides.get() or {}), **choices})
    try:
        yield
    finally:
        _overrides.reset(token)


def forget() -> None:
    """After a table's file changed: the next call reads it again."""
    load.cache_clear()
    _lookup.cache_clear()


_overrides: ContextVar[Mapping[str, Mapping[str, int]] | None] = ContextVar("moe_kernels_tiles", default=None)


@lru_cache(maxsize=8192)
def _lookup(op: str, dtype: str, device_name: str | None, rows: int, shape: Shape) -> Mapping[str, int]:
    declared = load(DIRECTORY / f"{DEFAULT}.json")
    own = DIRECTORY / file_name(device_name) if device_name else None
    tuned = load(own) if own is not None and own.exists() else ()
    entry = choose(tuned, op, dtype, shape, rows) or choose(declared, op, dtype, shape, rows)
    if entry is None:
        raise TileTableError(f"{DIRECTORY / DEFAULT}.json declares no op {op!r}")
    if dict(entry.shape) != dict(shape):
        _say_unknown(op, dtype, device_name, shape)
    return entry.tiles


@cache
def load(path: Path) -> tuple[Entry, ...]:
    """The entries of a table.

    Raises:
        TileTableError: not JSON, a field missing or of a wrong type, or arguments other than the op's declared ones.
    """
    try:
        document = json.loads(path.read_text())
        entries = tuple(_entry(raw, f"{path}: entry {at}") for at, raw in enumerate(document["entries"]))
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise TileTableError(f"{path}: {type(error).__name__}: {error}") from error
    defaults = path.with_name(f"{DEFAULT}.json")
    declared = entries if path == defaults else load(defaults if defaults.exists() else DIRECTORY / defaults.name)
    names = {entry.op: entry.tiles.keys() for entry in reversed(declared)}
    for at, entry in enumerate(entries):
        if entry.op not in names:
            raise TileTableError(f"{path}: entry {at}: op {entry.op!r} is not one of {sorted(names)}")
        if entry.tiles.keys() != names[entry.op]:
            wanted, found = sorted(names[entry.op]), sorted(entry.tiles)
            raise TileTableError(f"{path}: entry {at}: {entry.op} takes {wanted}, found {found}")
    return entries


def file_name(device_name: str) -> str:
    """Example: "NVIDIA H200" -> "NVIDIA_H200.json"."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in device_name) + ".json"


def choose(entries: tuple[Entry, ...], op: str, dtype: str, shape: Shape, rows: int) -> Entry | None:
    """The nearest entry of ``op``: of ``dtype``, else of its stand-in, else of dtype "any"; None without any."""
    for wanted in (dtype, STAND_IN.get(dtype), "any"):
        found = [entry for entry in entries if entry.op == op and entry.dtype == wanted]
        same = [entry for entry in found if dict(entry.shape) == dict(shape)]
        if found:
            return min(same or found, key=lambda entry: _distance(entry, dict(shape), rows))
    return None


def _distance(entry: Entry, shape: Mapping[str, int], rows: int) -> float:
    known = dict(entry.shape)
    distance = abs(math.log2(max(rows, 1) / entry.rows))
    if shape.get("gated", 1) > known.get("gated", 2):
        distance += HALF_THE_OPERANDS
    for name in known.keys() | shape.keys():
        both = name in known and name in shape
        distance += abs(math.log2(max(shape[name], 1) / known[name])) if both else MISSING_KEY
    return distance


def _entry(raw: Mapping[str, Any], where: str) -> Entry:
    for name in ("op", "dtype"):
        if not isinstance(raw[name], str):
            raise TileTableError(f"{where}: {name} must be a string, found {raw[name]!r}")
    shape = tuple(_counts(raw["shape"], f"{where}: shape", least=1).items())
    rows = _counts({"rows": raw["rows"]}, where, least=1)["rows"]
    chosen = MappingProxyType(_counts(raw["tiles"], f"{where}: tiles", least=0))
    return Entry(op=raw["op"], dtype=raw["dtype"], shape=shape, rows=rows, tiles=chosen, us=float(raw.get("us", 0)))


def _counts(raw: Mapping[str, Any], where: str, *, least: int) -> dict[str, int]:
    if not isinstance(raw, dict):
        raise TileTableError(f"{where} must be an object, found {raw!r}")
    for name, value in raw.items():
        if type(value) is not int or value < least:
            raise TileTableError(f"{where}: {name} must be an integer >= {least}, found {value!r}")
    return raw


@cache
def _say_unknown(op: str, dtype: str, device_name: str | None, shape: Shape) -> None:
    """Once per op, dtype and shape, because it is cached."""
    _log.debug("%s: no %s tiles tuned for %s on %s; taking the nearest entries", op, dtype, dict(shape), device_name)
