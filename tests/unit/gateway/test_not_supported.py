"""What this server lacks is said: by the refusals, by the paths, and by the documentation, all from one list."""

from __future__ import annotations

import re
from pathlib import Path

from services.gateway.not_supported import PARAMETERS, PARTS, PATHS
from services.gateway.schema import NO_OPS, UNUSED, ChatBody, CompletionBody

ROOT = Path(__file__).parents[3]


def test_the_documentation_lists_what_is_not_supported():
    section = re.search(r"^## Not supported\n(.*?)^## ", (ROOT / "docs/api.md").read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = [line.split("|")[2] for line in section[1].splitlines() if line.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted([*PARAMETERS, *PARTS, *(f"/v1/{path}" for path in PATHS)])


def test_nothing_is_both_supported_and_not():
    declared = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert not declared & {*PARAMETERS, *UNUSED, *NO_OPS}
    assert not set(PARAMETERS) & set(UNUSED)
    assert set(NO_OPS) <= set(PARAMETERS), "a value that changes something is refused by what it asks for"
