"""A model's folder in, the sha256 of its weights out: by it a record says what it was measured on.

Records in JSON have it under ``weights``; for those with no place for it, ``traced.json`` beside them says it by file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pocket_moe.corpus.shards import file_sha256
from pocket_moe.errors import PocketError
from pocket_moe.model.export import EXPORT_AGAIN, WEIGHTS
from pocket_moe.records import load_json, save_json

TRACED: Final = "traced.json"
_WRITTEN_BY: Final = {
    "perplexity.json": "evaluate.py",
    "vllm.json": "agree.py",
    "acceptance.json": "speculate.py",
    "load.json": "trace.py --only experts",
    "experts.npz": "trace.py --only experts",
    "greedy.jsonl": "trace.py --only greedy",
    "samples.jsonl": "trace.py --only samples",
    "demo.jsonl": "trace.py --only demo",
    "logits.json": "trace.py --only logits",
}


def fingerprint(folder: Path) -> str:
    """sha256 of the weights in ``folder``.

    Raises:
        PocketError: there are none.
    """
    try:
        return file_sha256(folder / WEIGHTS)
    except OSError as error:
        raise PocketError(f"The model in {folder} cannot be read: {error}", hint=EXPORT_AGAIN) from error


def speculator_folders(speculators: Path) -> list[Path]:
    """Of the pool's models, in its order."""
    return sorted((path for path in speculators.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def held(root: Path) -> dict[str, Any]:
    """What the records of an example's folder have to be of: its ``model`` and its ``speculators``."""
    pool = speculator_folders(root / "speculators")
    return {"model": fingerprint(root / "model"), "speculators": [fingerprint(folder) for folder in pool]}


def note(file: Path, weights: Mapping[str, Any]) -> None:
    """Say in ``traced.json`` beside ``file`` which weights it was measured on; what it says of other files stays."""
    notes = file.parent / TRACED
    save_json(notes, (load_json(notes) if notes.is_file() else {}) | {file.name: weights})


def noted(file: Path) -> object:
    """What ``traced.json`` says of ``file``, None if nothing."""
    notes = file.parent / TRACED
    return load_json(notes).get(file.name) if notes.is_file() else None


def require(file: Path, said: object, wanted: Mapping[str, Any]) -> None:
    """That the record ``file``, which says to be of the weights ``said``, is of those ``wanted``.

    Raises:
        PocketError: it is of others, or does not say.
    """
    known = said if isinstance(said, Mapping) else {}
    other = [name for name, value in wanted.items() if known.get(name) != value]
    if other:
        raise PocketError(
            f"The record {file} was not measured on the {' and the '.join(other)} of this folder.",
            hint=f"Measure again: python examples/pocket-moe/{_WRITTEN_BY[file.name]}",
        )
