"""``python -m bench.report``: writes the tables of docs/kernels.md from ``results.csv``.

A table stands between ``<!-- bench:SUITE -->`` and ``<!-- /bench -->`` and holds the latest measurement of each op,
provider, shape, rows and dtype of that suite on a GPU. Everything outside such markers is left alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench import render, results

DOCUMENT: Final = Path(__file__).parents[2] / "docs/kernels.md"
BLOCK: Final = re.compile(r"(<!-- bench:(?P<suite>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
NOTHING: Final = "Not measured yet.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """With ``--check`` nothing is written and the exit code says whether the document is up to date."""
    parser = argparse.ArgumentParser(prog="bench.report", description="Writes docs/kernels.md's tables.")
    parser.add_argument("--csv", type=Path, default=results.DEFAULT_CSV)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the document is out of date")
    options = parser.parse_args(argv)
    before = options.document.read_text()
    after = regenerate(before, results.read(options.csv))
    if options.check:
        return int(before != after)
    options.document.write_text(after)
    return 0


def regenerate(text: str, records: Iterable[Mapping[str, str]]) -> str:
    """``text`` with the tables between markers made again."""
    newest = latest(records)

    def table(match: re.Match[str]) -> str:
        suite = match["suite"]
        return f"{match[1]}{_table(suite, [record for record in newest if record['suite'] == suite])}{match[3]}"

    return BLOCK.sub(table, text)


def latest(records: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The last record of each measurement that ran on a GPU or failed there, in the order of the first ones."""
    found: dict[tuple[str, ...], Mapping[str, str]] = {}
    for record in records:
        if record["gpu"] != "none":
            key = tuple(record[name] for name in ("suite", "op", "provider", "shape", "rows", "dtype", "gpu"))
            found[key] = record
    return list(found.values())


def _table(suite: str, records: Sequence[Mapping[str, str]]) -> str:
    if not records:
        return NOTHING
    parts = []
    for gpu in dict.fromkeys(record["gpu"] for record in records):
        here = [record for record in records if record["gpu"] == gpu]
        rows = [results.parse(record) for record in here]
        rows = [row for row in rows if not row.error.startswith("unsupported")]
        parts.append(f"{render.for_suite(suite, rows)}\n\n{_source(here)}\n")
    return "\n".join(parts)


def _source(records: Sequence[Mapping[str, str]]) -> str:
    """Where the numbers come from. Example: "NVIDIA H200; torch 2.11.0; triton 3.6.0; 2026-11-21, commit abc."."""
    last = max(records, key=lambda record: record["date"])
    versions = [f"{name} {last[name]}" for name in ("torch", "triton", "vllm") if last[name]]
    dates = sorted({f"{record['date']}, commit {record['commit']}" for record in records})
    return "; ".join([last["gpu"], *versions, *dates]) + "."


if __name__ == "__main__":
    sys.exit(main())
