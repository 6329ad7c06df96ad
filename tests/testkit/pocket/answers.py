"""The pocket model's recorded answers, asked for over REST."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from testkit.processes.servers import Bench, Server
from testkit.waiting import until

POCKET = Path(__file__).parents[3] / "examples/pocket-moe"
END = 0
MAX_TOKENS = 48


def serve_pocket(stage: Bench, folder: Path = POCKET / "model", **options: object) -> Server:
    """``expertmesh serve`` of the model, or of a copy in ``folder``, until /ready, with leases that end soon."""
    common = {"served_model_name": "pocket", "dtype": "float32", "threads": 1, "lease": 2}
    return stage.serve(folder, **(common | options))


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (POCKET / "records/greedy.jsonl").read_text().splitlines()]


async def complete(client: httpx.AsyncClient, record: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "pocket", "prompt": record["prompt"], "max_tokens": MAX_TOKENS, "temperature": 0}
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def complete_all(url: str, wanted: Sequence[dict[str, Any]], at_once: int = 200) -> list[dict[str, Any]]:
    places = asyncio.Semaphore(at_once)

    async def one(record: dict[str, Any]) -> dict[str, Any]:
        async with places:
            return await complete(client, record)

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=at_once)) as client:
        return await asyncio.gather(*map(one, wanted))


async def answers_while(server: Server, disturb: Callable[[], None], count: int = 200, at_once: int = 64) -> None:
    """So many recorded answers come, though ``disturb`` happens once they have begun."""
    wanted = recorded()[:count]
    asking = asyncio.create_task(complete_all(server.url, wanted, at_once=at_once))
    drawn = partial(server.metric, "expertmesh_decode_tokens_total")
    before = drawn()
    await asyncio.to_thread(until, lambda: drawn() > before, "answers have begun")
    await asyncio.to_thread(disturb)
    assert not asking.done(), "the disturbance came too late to disturb"
    assert_recorded(wanted, await asking)


def assert_recorded(wanted: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> None:
    for record, choice in zip(wanted, found, strict=True):
        ended = record["output_ids"][-1] == END
        assert [token for token in choice["token_ids"] if token != END] == record["output_ids"][: -1 if ended else None]
        assert (choice["text"], choice["finish_reason"]) == (record["text"], "stop" if ended else "length")
