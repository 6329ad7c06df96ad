"""Working folder in, the little of it that the card shows out: loss curves thinned, and how much text there was."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pocket_moe.records import load_csv, save_csv, save_json
from pocket_moe.shards import Shards

COLUMNS: Final = ("step", "tokens", "lr", "loss", "balance", "peak", "tokens_per_second", "heldout")
_MOST_ROWS: Final = 400


def collect(work: Path, records: Path, runs: dict[str, Sequence[str]]) -> None:
    """Write ``loss-NAME.csv`` for each model and ``text.json``. ``runs`` gives a model's runs in the order in which
    one went on from the other; later ones count their steps and tokens onwards.

    Raises:
        PocketError: a run or the shards are missing.
    """
    for name, parts in runs.items():
        rows = _joined([load_csv(work / "runs" / part / "loss.csv") for part in parts])
        save_csv(records / f"loss-{name}.csv", COLUMNS, [[row[column] for column in COLUMNS] for row in _thin(rows)])
    save_json(records / "text.json", dataclasses.asdict(Shards(work / "shards", "heldout").meta))


def _joined(parts: Sequence[list[dict[str, str]]]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for part in parts:
        steps, tokens = (int(rows[-1][name]) if rows else 0 for name in ("step", "tokens"))
        rows += [
            row | {"step": str(int(row["step"]) + steps), "tokens": str(int(row["tokens"]) + tokens)} for row in part
        ]
    return rows


def _thin(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Every n-th line, and all with a held-out loss."""
    every = -(-len(rows) // _MOST_ROWS) or 1
    return [row for index, row in enumerate(rows) if index % every == 0 or row["heldout"] or index == len(rows) - 1]
