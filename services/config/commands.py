"""The choice among the commands of one that has several, as `expertmesh bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from services.config.load import nearest_hint
from services.errors import ConfigError

Command = TypeVar("Command")


def chosen(program: str, argv: Sequence[str], commands: Mapping[str, Command], usage: str) -> Command:
    """Returns the command that ``argv`` begins with. Prints ``usage`` and exits where it begins with none, or asks for
    help.

    Raises:
        ConfigError: there is no such command of ``program``.
    """
    first = argv[0] if argv else ""
    if first in ("", "-h", "--help", "help"):
        print(usage)
        raise SystemExit(0 if first else 2)
    if first not in commands:
        hint = nearest_hint(first, commands) or f"See `{program} --help`."
        raise ConfigError(f"There is no `{program} {first}`.", hint=hint)
    return commands[first]
