"""What a token costs Redis with disaggregated experts: the same for a small model and for one forty times its size."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from testkit.models.checkpoints import save_checkpoint
from testkit.processes.servers import Bench, Server, bench, free_port
from testkit.waiting import until

AT_ONCE, TOKENS = 8, 200
LEASE_S, IDLE_S = 3.0, 6.0
"""Every process beats four times a lease or more often: eight times in the window at rest."""
SMALL: dict[str, Any] = {}
LARGE: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 128, "num_experts": 32, "moe_intermediate_size": 64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Bytes into Redis: for each token, what flows at rest taken off; and each second at rest."""

    per_token: float
    idle_per_s: float


def received(port: int) -> int:
    with redis.Redis(port=port) as client:
        return int(client.info("stats")["total_net_input_bytes"])


async def generate(server: Server) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(AT_ONCE)))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [TOKENS] * AT_ONCE


def measured(stage: Bench, model: Path) -> Cost:
    port = free_port()
    stage.redis(port=port, append_only=False)
    server = stage.serve(
        model,
        served_model_name="tiny",
        redis_url=f"redis://127.0.0.1:{port}/0",
        dtype="float32",
        threads=1,
        lease=LEASE_S,
        layout="disaggregated",
        expert_workers=2,
        expert_groups=2,
    )
    until(lambda: server.metric("expertmesh_expert_seats") == 2, "all seats are listed")
    asyncio.run(generate(server))  # scripts are loaded by now
    before = received(port)
    time.sleep(IDLE_S)
    idle_per_s = (received(port) - before) / IDLE_S
    before, began = received(port), time.monotonic()
    asyncio.run(generate(server))
    moved = received(port) - before - idle_per_s * (time.monotonic() - began)
    server.proc.stop()
    return Cost(per_token=moved / (AT_ONCE * TOKENS), idle_per_s=idle_per_s)


@pytest.mark.night
def test_bytes_per_token_do_not_grow_with_the_model(tmp_path: Path) -> None:
    costs, weights = [], []
    with bench(tmp_path) as stage:
        for name, changes in (("small", SMALL), ("large", LARGE)):
            model = save_checkpoint(tmp_path / name, "qwen3_moe", seed=3, **changes)
            weights.append((model / "model.safetensors").stat().st_size)
            costs.append(measured(stage, model))
    for size, cost in zip(weights, costs, strict=True):
        print(f"{size / 1e6:6.2f} MB: {cost.per_token:6.1f} B per token, {cost.idle_per_s:6.0f} B/s at rest")
    small, large = costs
    assert weights[1] > 20 * weights[0]
    assert 20 < small.per_token < 400
    assert large.per_token < 1.5 * small.per_token, "more than batches of another size explain"
