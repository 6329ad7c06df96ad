"""The one error that the scripts of this folder show to their user."""

from __future__ import annotations

import importlib
from typing import Any


class PocketError(Exception):
    """Something the user can mend. ``hint`` says how; scripts print both and exit with 1."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def needed(module: str, hint: str) -> Any:
    """A package that only some steps use. Raises PocketError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PocketError(f"{module} cannot be imported: {error}", hint=hint) from error
