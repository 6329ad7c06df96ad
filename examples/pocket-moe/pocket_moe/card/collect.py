"""Working folder in, the little of it that the card shows out: loss curves thinned, the manifest, how much text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from pocket_moe.corpus.manifest import save_manifest
from pocket_moe.corpus.shards import Shards
from pocket_moe.readers.sources import Source
from pocket_moe.records import load_csv, load_json, save_csv, save_json

COLUMNS: Final = ("step", "tokens", "lr", "loss", "balance", "peak", "tokens_per_second", "heldout")
_MOST_ROWS: Final = 400


def collect(work: Path, records: Path, runs: dict[str, Sequence[str]], sources: Sequence[Source]) -> None:
    """Write ``loss-NAME.csv`` for each model and ``text.json`` to ``records``, ``manifest.json`` beside that folder.
    ``runs`` gives a model's runs in the order in which one went on from the other; later ones count their steps and
    tokens onwards. ``sources`` are the list of packages as it is now: a label mended there needs no text gathered anew.

    Raises:
        PocketError: a run, the shards or the manifest are missing.
    """
    for name, parts in runs.items():
        rows = _joined([load_csv(work / "runs" / part / "loss.csv") for part in parts])
        save_csv(records / f"loss-{name}.csv", COLUMNS, [[row[column] for column in COLUMNS] for row in _thin(rows)])
    save_json(records / "text.json", _text(Shards(work / "shards", "heldout")))
    save_manifest(labelled(load_json(work / "manifest.json"), sources), records.parent / "manifest.json")


def labelled(manifest: dict[str, Any], sources: Sequence[Source]) -> dict[str, Any]:
    """The manifest with the licences' names and the notices that ``sources`` have; rows they do not know stay."""
    known = {(source.domain, source.package): source for source in sources}
    rows = [
        row | {"licence": source.licence, "notice": source.notice}
        if (source := known.get((row["domain"], row["package"])))
        else row
        for row in manifest["sources"]
    ]
    return manifest | {"sources": rows}


def _text(heldout: Shards) -> dict[str, Any]:
    """The shards' counts, and how many documents of each domain are held out."""
    counts = np.bincount(heldout.domain, minlength=len(heldout.meta.domains)).tolist()
    by_domain = dict(zip(heldout.meta.domains, counts, strict=True))
    return dataclasses.asdict(heldout.meta) | {"heldout_documents": by_domain}


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
