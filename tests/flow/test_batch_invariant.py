"""In bfloat16, with --batch-invariant: many streams at once get the tokens of one after another, wherever the experts
are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from testkit.pocket.answers import complete_all, recorded, serve_pocket
from testkit.processes.servers import Server, bench
from testkit.waiting import until

pytestmark = pytest.mark.alone
PROMPTS, STREAMS = 64, 64
INVARIANT = {"dtype": "bfloat16", "batch_invariant": True}


def _tokens(server: Server, at_once: int) -> list[Any]:
    wanted = recorded()[:PROMPTS]
    choices = asyncio.run(complete_all(server.url, wanted, at_once=at_once))
    return [choice["token_ids"] for choice in choices]


def test_a_crowd_gets_the_tokens_of_a_serial_run_wherever_the_experts_are(tmp_path: Path) -> None:
    with bench(tmp_path) as stage:
        server = serve_pocket(stage, **INVARIANT)
        alone = _tokens(server, at_once=1)
        assert _tokens(server, at_once=STREAMS) == alone
        assert server.metric("expertmesh_prefix_cache_hit_tokens_total") > 0
    with bench(tmp_path) as stage:
        apart = {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 2}
        server = serve_pocket(stage, **INVARIANT, **apart)
        until(lambda: server.metric("expertmesh_expert_seats") == 2, "both groups are served")
        assert _tokens(server, at_once=STREAMS) == alone
