"""Experts held as integers, through the whole server: greedy answers are the oracle's over what the integers stand for.

In float32, in every layout; a worker that takes the place of a killed one holds the same. Workers that are asked for
different forms do not serve together.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from testkit.models.checkpoints import VOCAB, save_checkpoint
from testkit.models.oracles import complete_all, oracles_answers
from testkit.models.quantised_checkpoints import quantise
from testkit.models.quantisers import FORMATS, Format, gptq
from testkit.processes.servers import bench
from testkit.waiting import until

from services.config import ExpertFormat

pytestmark = pytest.mark.alone

LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {},
    "apart": {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 1},
    "colocated": {"layout": "colocated", "workers": 2},
    "lockstep": {"layout": "lockstep", "workers": 2, "expert_slices": 2},
}
WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "num_experts": 4}
ACT_ORDER = Format(
    encode=gptq(4, 32, sorts=True), config={**FORMATS["gptq-int4"].config, "group_size": 32, "desc_act": True}
)
CASES: list[tuple[str, ExpertFormat, int, Format | None]] = [
    ("local", "int4", 128, None),
    ("apart", "int8", 64, None),
    ("apart", "auto", 64, FORMATS["gptq-int8-row"]),
    ("apart", "auto", 64, ACT_ORDER),
    ("colocated", "mxfp4", 128, None),
    ("lockstep", "int4", 256, None),
    ("lockstep", "auto", 256, ACT_ORDER),
]
"""Layout, format, width of the experts, and of which checkpoint: "auto" holds it as it is."""


@pytest.mark.parametrize(("layout", "expert_format", "width", "stored"), CASES)
def test_greedy_answers_are_the_oracles(
    tmp_path: Path, layout: str, expert_format: ExpertFormat, width: int, stored: Format | None
) -> None:
    folder = save_checkpoint(tmp_path / "plain", "qwen3_moe", seed=11, moe_intermediate_size=width, **WIDE)
    if stored is not None:
        folder = quantise(folder, tmp_path, stored).folder
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 7, 16, 33, 70)]
    expected = oracles_answers(folder, prompts, 10, expert_format=expert_format)
    assert len({token for answer in expected for token in answer}) > 15, "answers too uniform to prove much"
    with bench(tmp_path) as stage:
        options = {"served_model_name": "tiny", "dtype": "float32", "kv_blocks": 128, "max_model_len": 256}
        server = stage.serve(folder, expert_format=expert_format, **options, **LAYOUTS[layout])
        assert asyncio.run(complete_all(server, prompts, 10)) == expected
        if layout == "apart":
            server.of_role("experts")[0].kill()
            until(lambda: len(server.of_role("experts")) == 2, "another one was started")
            until(lambda: server.metric("expertmesh_expert_seats") == 2, "it took the seat's place")
            assert asyncio.run(complete_all(server, prompts, 10)) == expected
