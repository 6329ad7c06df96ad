"""Every role on a host of its own: 2 attention and 3 expert workers with replicas answer as the all-in-one server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from testkit.pocket.answers import END, POCKET, recorded
from testkit.processes.cluster import Cluster, Shape
from testkit.processes.netns import Network
from testkit.processes.servers import Server, bench

from loadgen.client import StreamResult, stream_completion
from loadgen.connections import Session

STREAMS = 64

pytestmark = [pytest.mark.alone, pytest.mark.night]


def bodies() -> list[dict[str, Any]]:
    """64 prompts; 16 to 64 tokens of each answer, also past its end."""
    asked = {"model": "pocket", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    prompts = [record["prompt"] for record in recorded()[:STREAMS]]
    return [asked | {"prompt": prompt, "max_tokens": 16 + i % 49} for i, prompt in enumerate(prompts)]


async def answers(url: str) -> list[StreamResult]:
    """All of them at once."""
    async with Session() as session:
        return await asyncio.gather(*(stream_completion(session, url, body) for body in bodies()))


def contents(results: list[StreamResult]) -> list[tuple[object, ...]]:
    return [(result.error, result.token_ids, result.text, result.finish_reason) for result in results]


def test_separate_hosts_answer_as_one_process(network: Network, pocket: Server, tmp_path: Path) -> None:
    together = asyncio.run(answers(pocket.url))
    with bench(tmp_path) as stage:
        shape = Shape(attention=2, experts=3, groups=2, schedulers=1)
        cluster = Cluster(stage, network.host, POCKET / "model", shape)
        cluster.start()
        separate = asyncio.run(answers(cluster.server.url))
    assert contents(separate) == contents(together)
    for body, record, result in zip(bodies(), recorded(), separate, strict=False):
        assert len(result.token_ids) == body["max_tokens"]
        known = [token for token in record["output_ids"] if token != END][: body["max_tokens"]]
        assert result.token_ids[: len(known)] == known
