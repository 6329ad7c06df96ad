"""The pocket model, served, gives the recorded answers: the reference's greedy tokens, 200 prompts at once, as text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from testkit.servers import bench

POCKET = Path(__file__).parents[2] / "examples/pocket-moe"
END = 0
MOST_TOKENS = 48


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (POCKET / "records/greedy.jsonl").read_text().splitlines()]


async def complete(client: httpx.AsyncClient, record: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "pocket", "prompt": record["prompt"], "max_tokens": MOST_TOKENS, "temperature": 0}
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def complete_all(url: str, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=len(wanted))) as client:
        return await asyncio.gather(*(complete(client, record) for record in wanted))


def test_recorded_answers(tmp_path: Path) -> None:
    wanted = records()
    assert len(wanted) == 200
    with bench(tmp_path) as stage:
        server = stage.serve(POCKET / "model", served_model_name="pocket", dtype="float32")
        found = asyncio.run(complete_all(server.url, wanted))
    for record, choice in zip(wanted, found, strict=True):
        ended = record["output_ids"][-1] == END
        assert [token for token in choice["token_ids"] if token != END] == record["output_ids"][: -1 if ended else None]
        assert (choice["text"], choice["finish_reason"]) == (record["text"], "stop" if ended else "length")
