"""What the scripts of this folder share: how they are asked, and how they tell their user what went wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pocket_moe.errors import PocketError

EXAMPLE: Final = Path("examples/pocket-moe")
WORK: Final = Path("build/pocket-moe")
DOES_NOT_HOLD: Final = 3
"""Exit status of a script that measured, and found that what is claimed of the model is not so; 1 is for errors."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """For a script whose docstring is ``description``; its lines stay as they are."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def measuring_parser(description: str | None, *, work: str = "folder with shards/") -> argparse.ArgumentParser:
    """:func:`parser` with --model, --work and --out: what a script measures, on what, and where the records go."""
    made = parser(description)
    made.add_argument("--model", type=Path, default=EXAMPLE / "model")
    made.add_argument("--work", type=Path, default=WORK, help=work)
    made.add_argument("--out", type=Path, default=EXAMPLE / "records")
    return made


def reported(run: Callable[[], int | None]) -> int:
    """``run``'s exit status, 0 if it returns none; a PocketError is printed with its hint, and gives 1."""
    try:
        return run() or 0
    except PocketError as error:
        print(f"error: {error.message}\n{error.hint}", file=sys.stderr)
        return 1
