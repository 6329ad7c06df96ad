"""`expertmesh config`: every setting, its effective value, and the place that value came from. Secrets are masked."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.config import Layered, OptionParser, concerned, is_hidden, layer, parse_options


def main(argv: Sequence[str]) -> int:
    """Prints a table, or JSON with --json."""
    parser = OptionParser("expertmesh config", "Show the effective configuration and where each value came from.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parse_options(parser, argv, concerned(None))
    layered = layer(given)
    print(_as_json(layered) if given["json"] else _as_table(layered))
    return 0


def _as_json(layered: Layered) -> str:
    values = _shown(layered)
    return json.dumps(
        {name: {"value": value, "from": layered.origin(name)} for name, value in values.items()}, indent=2
    )


def _shown(layered: Layered) -> dict[str, object]:
    """Returns the values of all settings, without hidden ones that are not set."""
    values = layered.settings.shown()
    return {name: value for name, value in values.items() if name in layered.origins or not is_hidden(name)}


def _as_table(layered: Layered) -> str:
    rows = [("option", "value", "from")]
    rows += [(name, _text(value), layered.origin(name)) for name, value in _shown(layered).items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
