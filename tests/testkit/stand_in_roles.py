"""What processes that stand in for the roles (unit/supervisor/fakes) noted of themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Notes = list[dict[str, Any]]


def notes_in(home: Path, what: str = "started") -> Notes:
    """In the order in which they were made."""
    path = home / "notes"
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [note for note in notes if note["what"] == what]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)
