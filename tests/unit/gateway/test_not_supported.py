"""What this server lacks is said: by the refusals, by the paths, and by the documentation, all from one list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rest", ["", "/", "/some/thing?x=1"])
async def test_a_path_that_is_not_offered_says_so(gateway, path, rest):
    for ask in (gateway.http.get, gateway.http.post):
        answer = await ask(f"/v1/{path}{rest}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["message"] == f"/v1/{path} is not offered by this server; see docs/api.md#not-supported."
        assert error["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/redoc", "/docs"),
    ],
)
async def test_a_path_that_is_nearly_right_names_the_right_one(gateway, path, meant):
    answer = await gateway.http.post(f"{gateway.url}{path}", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"There is nothing at this path. Did you mean {meant}?"


async def test_another_path_is_only_not_there(gateway):
    for path in ("/v1", "/v1/", "/v1/embedding", "/embeddings", "/v2/embeddings", "/v1//embeddings", "//v1/embeddings"):
        answer = await gateway.http.get(f"{gateway.url}{path}")
        assert answer.json()["error"]["message"].startswith("There is nothing at this path."), path
