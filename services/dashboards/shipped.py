"""The dashboards that come along: the files that the chart installs for Grafana. A wheel brings them, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from services.config import nearest_hint
from services.dashboards.model import Dashboard, parse
from services.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "helm/expertmesh/dashboards"


def shipped(folder: Path = FOLDER) -> dict[str, Dashboard]:
    """Return the dashboards of ``folder`` by the names of their files.

    Raises:
        ConfigError: there are none, or a file is no dashboard.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = parse(file.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{file} is no dashboard: {error}.") from error
    if not found:
        raise ConfigError(f"There are no dashboards in {folder}.", hint="Install expertmesh again.")
    return found


def chosen(boards: Mapping[str, Dashboard], names: Sequence[str]) -> dict[str, Dashboard]:
    """Return the dashboards called ``names``, by file, uid or title; all of them without names.

    Raises:
        ConfigError: there is none of a name.
    """
    if not names:
        return dict(boards)
    known = {alias: key for key, board in boards.items() for alias in (board.title.lower(), board.uid.lower(), key)}
    for name in names:
        if name.lower() not in known:
            listed = f"There are: {', '.join(boards)}."
            raise ConfigError(f"Unknown dashboard {name!r}.", hint=nearest_hint(name, boards) or listed)
    return {key: boards[key] for key in dict.fromkeys(known[name.lower()] for name in names)}
