"""``python -m testkit.docs.load_report RUN.json BROKEN.json``: draws the pictures of docs/load-report.md from results
of `expertmesh-load run`. Needs chromium on PATH."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.report.html import write
from loadgen.results import Results, read
from testkit.docs.dashboards import PHONE, shot

FOLDER: Final = Path(__file__).parents[3] / "docs/plots/load"
LAPTOP: Final = 1280


def pictures(run: Results, broken: Results) -> Iterator[tuple[str, bytes]]:
    """Names and contents: a report on a laptop and a phone, light and dark, and that of a run that is of no use."""
    with tempfile.TemporaryDirectory() as folder:
        page, bad = Path(folder) / "run.html", Path(folder) / "broken.html"
        write(page, run)
        write(bad, broken)
        for name, width in (("laptop", LAPTOP), ("phone", PHONE)):
            yield f"report-{name}", shot(page, width)
            yield f"report-{name}-dark", shot(page, width, dark=True)
        yield "report-broken", shot(bad, LAPTOP)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in pictures(read(Path(sys.argv[1])), read(Path(sys.argv[2]))):
        (FOLDER / f"{name}.webp").write_bytes(content)
        print(f"{name}.webp: {len(content):,} bytes")
