"""Files of results: whether they can be written, before a measurement, and what happens if they cannot after it."""

from __future__ import annotations

import os
from contextlib import suppress
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


def write_whole(path: Path, content: bytes) -> None:
    """Writes ``content`` to ``path``: all of it, or what was there stays where the folder may be written to.

    Raises:
        FileUnusable: it cannot be written, as on a full disk.
    """
    path = path.resolve()
    regular = path.is_file() or not path.exists()
    draft = path.with_name(f"{path.name}.draft") if regular and os.access(path.parent, os.W_OK) else path
    try:
        draft.write_bytes(content)
        if draft != path:
            draft.replace(path)
    except OSError as error:
        if draft != path:
            with suppress(OSError):
                draft.unlink()
        raise FileUnusable(
            f"Cannot write {path}: {error.strerror}.", hint="Its figures are those that were printed."
        ) from error
