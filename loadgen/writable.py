"""Looks before a measurement whether its results can be written."""

from __future__ import annotations

from pathlib import Path

from loadgen.errors import FileUnusable


def check_writable(path: Path) -> None:
    """Raises FileUnusable where ``path`` cannot be written: better before a run than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise FileUnusable(f"Cannot write {path}: {error.strerror}.") from error
