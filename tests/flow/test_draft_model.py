"""A server with a draft model gives the answers of one without: recorded ones, sampled ones, in each layout, while
sequences are preempted and prompts cut and cached, and while an attention worker is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.pocket.answers import POCKET, answers_while, assert_recorded, complete_all, recorded, serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone
STREAMS = 64


def _drafts(number: int, branches: int) -> str:
    folder = str(POCKET / "speculators" / str(number))
    drafts = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4, "num_branches": branches}
    return json.dumps(drafts)


def _room(number: int = 0, branches: int = 1) -> dict[str, Any]:
    return {"speculative_config": _drafts(number, branches), "max_num_seqs": 160}


def _accepted(server: Server) -> float:
    return server.metric("expertmesh_accepted_draft_tokens_total")


def test_no_token_changes_while_an_attention_worker_is_killed(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, workers=2, **_room())
        asyncio.run(answers_while(server, server.of_role("attention")[0].kill))
        until(lambda: _accepted(server) > 0, "drafts were accepted")
        until(lambda: len(server.of_role("attention")) == 2, "another one was started")


@pytest.mark.parametrize(
    "layout",
    [
        {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 2},
        {"layout": "colocated", "workers": 2},
        {"layout": "lockstep", "workers": 2},
    ],
    ids=lambda layout: layout["layout"],
)
def test_no_token_changes_where_rows_travel(tmp_path: Path, layout: dict[str, Any]) -> None:
    wanted = recorded()[:96]
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, **_room(), **layout)
        assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted, at_once=48)))
        until(lambda: _accepted(server) > 0, "drafts were accepted")


@pytest.mark.parametrize(("number", "branches"), [(0, 2), (1, 1)])
def test_sampled_answers_of_sixty_four_streams_stay_the_same(tmp_path: Path, number: int, branches: int) -> None:
    """With little cache, prompts in pieces and common beginnings; once without drafts, once with."""
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, **_room(number, branches), kv_blocks=260, max_num_batched_tokens=48)
        plain = asyncio.run(_answers(server, "off"))
        assert server.metric("expertmesh_draft_tokens_total") == 0
        before = server.metric("expertmesh_preemptions_total")
        assert asyncio.run(_answers(server, "auto")) == plain
        until(lambda: _accepted(server) > 0, "drafts were accepted")
        assert server.metric("expertmesh_preemptions_total") > before
        for seen in ("prefix_cache_hit_tokens_total", "prefill_chunks_total", "draft_step_seconds_count"):
            assert server.metric(f"expertmesh_{seen}") > 0
        assert server.metric("expertmesh_drafting_failures_total") == 0


async def _answers(server: Server, speculation: str) -> list[tuple[list[int], str]]:
    async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(max_connections=STREAMS)) as client:
        return await asyncio.gather(*(_answer(client, number, speculation) for number in range(STREAMS)))


async def _answer(client: httpx.AsyncClient, number: int, speculation: str) -> tuple[list[int], str]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.6, "frequency_penalty": 0.2},
        {"temperature": 1.0, "top_p": 0.9},
    ]
    record = recorded()[number % 8]
    prompt = [*record["prompt_ids"], *record["output_ids"][:24]]
    body = {"model": "pocket", "prompt": prompt, "max_tokens": 80, "seed": number, "ignore_eos": True}
    body |= {"return_token_ids": True, "speculation": speculation} | kinds[number // 8 % 4]
    response = await client.post("/v1/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["finish_reason"]
