"""Reads ``config.json`` and its neighbours with types: a wrong value raises a CheckpointError with file and key."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
_REPAIR = "Correct the file, or download the checkpoint again."
_MAX_COUNT = 2**31 - 1


class ConfigFile:
    """Typed access to the keys of one JSON object.

    Where a getter takes several ``keys``, these are names of one thing in different versions of the format: the first
    that is present counts. Null counts as absent. Absence is an error unless there is a ``default``.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def section(self, key: str) -> ConfigFile:
        """Return the object under ``key``, or an empty one."""
        value = self._find((key,), {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        return ConfigFile(self.path, value)

    def text(self, *keys: str, default: str | None = None) -> str:
        value = self._find(keys, default)
        if not isinstance(value, str):
            raise self.wrong(keys[0], "a string", value)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._find((key,), default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._find(keys, default)
        # Bounds first: JSON's whole numbers may be too large for a float. No comparison holds for NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(keys[0], "a number above 0", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def count(self, *keys: str, default: int | None = None, maximum: int = _MAX_COUNT) -> int:
        """Return a whole number above 0. ``maximum`` keeps a damaged one from sizing a list or a loop without end."""
        value = self._find(keys, default)
        if not _is_int(value) or value <= 0:
            raise self.wrong(keys[0], "a whole number above 0", value)
        if value > maximum:
            raise self.wrong(keys[0], f"at most {maximum}", value)
        return int(value)

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """Read as :meth:`count` does, but null and 0 give None, and absence gives ``default``."""
        return None if self.values.get(key, default) in (None, 0) else self.count(key, default=default)

    def token_id(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (not _is_int(value) or value < 0):
            raise self.wrong(key, "a token id", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a whole number or a list of them, as a tuple; null and absence give ()."""
        value = self.values.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in found):
            raise self.wrong(key, "a whole number or a list of them", value)
        return tuple(found)

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings", value)
        return tuple(value)

    def wrong(self, key: str, expected: str, found: object) -> CheckpointError:
        shown = "nothing" if found is None else f"{found!r:.80}"
        return CheckpointError(f'{self.path}: "{key}" must be {expected}, found {shown}.', hint=_REPAIR)

    def _find(self, keys: tuple[str, ...], default: Any) -> Any:
        present = (self.values[key] for key in keys if self.values.get(key) is not None)
        return next(present, default)


def read_config(model_dir: Path) -> ConfigFile:
    """Return ``config.json`` of the folder.

    Raises:
        CheckpointError: there is no such folder or file, or it is not a JSON object.
    """
    path = model_dir / CONFIG
    if model_dir.suffix == ".gguf" and model_dir.is_file():
        raise CheckpointError(
            f"{model_dir} is a GGUF file; GGUF is not supported.",
            hint="Use the model's *.safetensors version in float32, bfloat16 or float16.",
        )
    if not model_dir.is_dir():
        raise CheckpointError(
            f"{model_dir} is not a folder.",
            hint="Give --model the folder of a checkpoint, or ORG/NAME of one on the Hugging Face Hub.",
        )
    if not path.is_file():
        raise CheckpointError(
            f"{model_dir} has no {CONFIG}.",
            hint="Give --model the folder that holds config.json, tokenizer.json and the *.safetensors files.",
        )
    return _read(path)


def read_generation_config(model_dir: Path) -> ConfigFile:
    """Return ``generation_config.json`` of the folder; empty if there is none."""
    path = model_dir / GENERATION_CONFIG
    return _read(path) if path.is_file() else ConfigFile(path, {})


def _read(path: Path) -> ConfigFile:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.", hint=_REPAIR) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object.", hint=_REPAIR)
    return ConfigFile(path, values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
