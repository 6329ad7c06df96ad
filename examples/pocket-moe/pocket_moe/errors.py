"""The one error that the scripts of this folder show to their user."""

from __future__ import annotations


class PocketError(Exception):
    """Something the user can mend. ``hint`` says how; scripts print both and exit with 1."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
