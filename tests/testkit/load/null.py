"""A null server in the process of a test, and a load for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from loadgen.null.behaviour import Behaviour
from loadgen.null.server import serve
from loadgen.plan import Plan
from loadgen.schedule.schedule import at_once
from loadgen.workload.bodies import Bodies
from loadgen.workload.synthetic import Singles
from loadgen.workload.words import Lengths, Prompts

SINGLES = Singles(prompts=Prompts(ids=True), prompt_tokens=Lengths(4, 9), output_tokens=Lengths(1, 9), seed=0)


@asynccontextmanager
async def null(behaviour: Behaviour) -> AsyncIterator[str]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(behaviour, host="127.0.0.1", port=0, on_ready=port.set_result))
    try:
        yield f"http://127.0.0.1:{await port}"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def plan(url: str) -> Plan:
    bodies = Bodies(endpoint="completions", model="null", common={"return_token_ids": True})
    return Plan(url=url, bodies=bodies, source=SINGLES, load=at_once(40))


async def stats(url: str) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        found: dict[str, float] = (await client.get(f"{url}/stats")).json()
        return found
