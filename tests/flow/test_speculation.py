"""A server that drafts tokens gives the recorded answers, in each layout and while an attention worker is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from testkit.pocket.answers import MAX_TOKENS, answers_while, assert_recorded, complete_all, recorded, serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
ROOM: dict[str, Any] = {"speculative_config": DRAFTS, "max_num_seqs": 160}


def _accepted(server: Server) -> float:
    return server.metric("expertmesh_accepted_draft_tokens_total")


@pytest.mark.parametrize("branches", [1, 4])
def test_no_token_changes_while_an_attention_worker_is_killed(tmp_path: Path, branches: int) -> None:
    drafts = json.dumps(json.loads(DRAFTS) | {"num_branches": branches})
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, workers=2, **ROOM | {"speculative_config": drafts})
        asyncio.run(answers_while(server, server.of_role("attention")[0].kill))
        until(lambda: _accepted(server) > 0, "drafts were accepted")
        until(lambda: len(server.of_role("attention")) == 2, "another one was started")


TREES = json.dumps({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "num_branches": 4})


def test_no_token_changes_with_trees_in_little_memory(tmp_path: Path) -> None:
    """64 streams whose prompts begin alike and come in pieces; preempted sequences are computed again."""
    wanted = [one for one in recorded() if len(one["output_ids"]) == MAX_TOKENS][:64]
    small = {"kv_blocks": 300, "block_size": 4, "max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 160}
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, speculative_config=TREES, **small)
        for _ in range(2):
            assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted, at_once=64)))
        until(lambda: _accepted(server) > 0, "drafts were accepted")
        chains = server.metric("expertmesh_draft_chains_total")
        assert server.metric("expertmesh_draft_tokens_total") > chains, "a chain has one draft, a tree has more"
        names = ("preemptions", "prefix_cache_hit_tokens", "prefill_chunks")
        seen = [server.metric(f"expertmesh_{name}_total") for name in names]
        assert min(seen) > 0


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
        server = serve_pocket(stage, **ROOM, **layout)
        assert_recorded(wanted, asyncio.run(complete_all(server.url, wanted, at_once=48)))
        until(lambda: _accepted(server) > 0, "drafts were accepted")


def test_a_request_chooses_and_gets_the_same_tokens(tmp_path: Path) -> None:
    """Sampled, with log-probabilities and penalties, one stream at a time."""
    repeated = "the cat sat on the mat. " * 8
    body = {"model": "pocket", "prompt": repeated, "max_tokens": 64, "seed": 5, "return_token_ids": True}
    body |= {"temperature": 0.6, "logprobs": 1, "frequency_penalty": 0.05, "ignore_eos": True}
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, **ROOM)
        plain = _answer(server, body | {"speculation": "off"})
        assert server.metric("expertmesh_draft_tokens_total") == 0
        assert _answer(server, body | {"speculation": "auto"}) == plain
        assert _answer(server, body | {"stream": False}) == plain
        until(lambda: _accepted(server) > 0, "drafts were accepted")
        refused = httpx.post(f"{server.url}/v1/completions", json=body | {"speculation": "on"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation")


def _answer(server: Server, body: dict[str, Any]) -> tuple[Any, ...]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["token_ids"], choice["logprobs"]["tokens"], choice["finish_reason"]
