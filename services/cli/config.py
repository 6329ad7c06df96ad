"""`expertmesh config`: every setting, its effective value, and the place that value came from. Secrets are masked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from services.config import TOPICS, Layered, OptionParser, Settings, concerned, is_hidden, layer, parse_options

_DEFAULT = "default"


def main(argv: Sequence[str]) -> int:
    """Prints a table for each topic, or JSON with --json."""
    about = "Show the effective configuration and where each value came from."
    parser = OptionParser("expertmesh config", about, epilog="Takes the options of `expertmesh serve`, too.")
    parser.add_argument("--changed", action="store_true", help="show only the settings that differ from their defaults")
    parser.add_argument(
        "--internal", action="store_true", help="also show internal settings, which processes hand to one another"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parse_options(parser, argv, concerned(None), common=())
    layered = layer(given)
    values = _shown(layered, changed=given["changed"], internal=given["internal"])
    if given["json"]:
        shown = {name: {"value": value, "from": layered.origin(name)} for name, value in values.items()}
        print(json.dumps(shown, indent=2))
        return 0
    console = Console()
    with console.capture() as table:
        for line in _table(layered, values):
            console.print(line, soft_wrap=True)
    print(table.get(), end="")  # rich would end with 1 where nobody reads to the end
    return 0


def _shown(layered: Layered, *, changed: bool, internal: bool) -> dict[str, object]:
    """Returns the values of the settings to show. A hidden one is shown where somebody has set it."""
    values, defaults = layered.settings.shown(), Settings().shown()
    return {
        name: value
        for name, value in values.items()
        if (internal or name in layered.origins or not is_hidden(name)) and not (changed and value == defaults[name])
    }


def _table(layered: Layered, values: dict[str, object]) -> Iterator[Text]:
    """Yields a heading and rows for each topic. Rows of settings that nobody has set are dimmed."""
    texts = {name: _text(value) for name, value in values.items()}
    widths = [max(map(len, column), default=0) for column in (texts, texts.values())]
    for topic, names in TOPICS.items():
        mine = [name for name in names if name in texts]
        if mine:
            yield Text(f"{topic}:", style="bold")
        for name in mine:
            origin = layered.origin(name)
            row = f"  {name:<{widths[0]}}  {texts[name]:<{widths[1]}}  {origin}"
            yield Text(row, style="dim" if origin == _DEFAULT else "")
    if not texts:
        yield Text("Every setting has its default.")


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
