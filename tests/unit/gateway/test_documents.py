"""What the OpenAPI document says of fields without effect."""

from __future__ import annotations

import msgspec

from services.gateway.schema import NO_OPS, UNUSED


async def test_fields_without_effect_are_in_the_document(gateway):
    schemas = (await gateway.http.get("/openapi.json")).json()["components"]["schemas"]
    for body in ("ChatBody", "CompletionBody"):
        properties = schemas[body]["properties"]
        for name in (*UNUSED, *NO_OPS):
            assert properties[name]["description"] == "Accepted for compatibility; changes nothing."
    assert "tools" not in schemas["TokenizeBody"]["properties"]
    assert schemas["ChatMessage"]["additionalProperties"] == {"enum": [None, [], {}, ""]}
    assert msgspec.json.schema(UNUSED["store"]) == {"type": "boolean"}
