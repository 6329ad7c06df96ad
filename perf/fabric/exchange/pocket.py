"""The pocket model with disaggregated experts: what its workers share in a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf.kit.stand_ins import fill_in

fill_in()

import torch  # noqa: E402

from perf.fabric.exchange.world import World  # noqa: E402
from services.model.experts import ExpertShard  # noqa: E402
from services.model.load_spec import load_spec  # noqa: E402
from services.model.weights import load_experts  # noqa: E402

POCKET = Path(__file__).resolve().parents[3] / "examples/pocket-moe"
SPEC = load_spec(POCKET / "model")
MAX_TOKENS = 48


class PocketWorld(World):
    """A world with the model's experts, in float32."""

    def shard(self, experts: dict[int, tuple[int, ...]], device: torch.device) -> ExpertShard:
        held = load_experts(POCKET / "model", SPEC, dtype=torch.float32, device=device, experts=experts)
        return ExpertShard(held, num_experts=SPEC.num_experts)


def pocket_world(rows: int) -> PocketWorld:
    return PocketWorld(
        hidden=SPEC.hidden_size, width=SPEC.expert_ffn, experts=SPEC.num_experts, slots=SPEC.top_k,
        layers=SPEC.num_layers, groups=1, rows=rows, dtype="float32", compute="shard",
    )  # fmt: skip


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (POCKET / "records/greedy.jsonl").read_text().splitlines()]


def said(token_ids: list[int]) -> list[int]:
    """An answer without the token that ends it, which is 0."""
    return [token_id for token_id in token_ids[:MAX_TOKENS] if token_id]
