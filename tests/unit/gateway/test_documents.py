"""The pages about the server: ``/`` and ``/docs``, and what the document says of fields without effect."""

from __future__ import annotations

import re

import msgspec
from testkit.http_peer import bearer

from services.gateway import docs_page
from services.gateway.schema import NO_OPS, UNUSED


async def test_the_root_names_the_pages_and_nothing_else(start):
    links = {"docs": "/docs", "openapi": "/openapi.json", "health": "/health", "models": "/v1/models"}
    for options, expected in (({}, links | {"metrics": "/metrics"}), ({"separate_metrics": True}, links)):
        gateway = await start(tenants=["alice"], **options)
        answer = await gateway.http.get("/")
        assert (answer.status_code, answer.json()) == (200, expected)
        for path in answer.json().values():
            assert (await gateway.http.get(path, headers=bearer("alice"))).status_code == 200
        head = await gateway.http.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]
        assert (await gateway.http.get("/health")).status_code == 200, "the connection goes on after a HEAD"
        assert (await gateway.http.post("/")).status_code == 405


async def test_the_page_of_the_api_lists_it_and_loads_nothing(gateway):
    answer = await gateway.http.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page, document = answer.text, (await gateway.http.get("/openapi.json")).json()
    assert not re.search(r"<script|<link|<img|src=|https?:|@import|url\(", page)
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}</code>" in page
    for name in document["components"]["schemas"]["ChatBody"]["properties"]:
        assert f"<code>{name}</code>" in page


async def test_what_a_checkpoint_is_called_is_no_markup(gateway):
    document = (await gateway.http.get("/openapi.json")).json()
    document["components"]["schemas"]["ChatBody"]["properties"]["model"] = {"enum": ['<b>&"', None]}
    page = docs_page.page(document).decode()
    assert "&lt;b&gt;&amp;&#34;" in page
    assert "<b>" not in page


async def test_fields_without_effect_are_in_the_document(gateway):
    schemas = (await gateway.http.get("/openapi.json")).json()["components"]["schemas"]
    for body in ("ChatBody", "CompletionBody"):
        properties = schemas[body]["properties"]
        for name in (*UNUSED, *NO_OPS):
            assert properties[name]["description"] == "Accepted for compatibility; changes nothing."
    assert "tools" not in schemas["TokenizeBody"]["properties"]
    assert schemas["ChatMessage"]["additionalProperties"] == {"enum": [None, [], {}, ""]}
    assert msgspec.json.schema(UNUSED["store"]) == {"type": "boolean"}
