"""Quantised checkpoints through the whole server: greedy answers are those of the oracle over dequantised weights.

In float32, in every layout, with experts and dense parts quantised. An expert worker that is killed is replaced.
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
from testkit.models.quantisers import FORMATS
from testkit.processes.servers import bench
from testkit.waiting import until

from services.model.digests import write_digests

pytestmark = pytest.mark.alone

LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {},
    "apart": {"layout": "disaggregated", "expert_workers": 2, "expert_groups": 1},
    "colocated": {"layout": "colocated", "workers": 2},
}
CASES = [
    ("local", "qwen3_moe", "fp8-block-remainder"),
    ("local", "qwen2_moe", "ct-int4-group-asym"),
    ("local", "mixtral", "awq"),
    ("local", "olmoe", "mxfp4"),
    ("apart", "qwen2_moe", "gptq-int4-act-order"),
    ("colocated", "mixtral", "fp8-block"),
]
STORED = [("local", "qwen2_moe", "fp8-block-bf16-scales"), ("apart", "qwen3_moe", "ct-int4-channel-asym")]
STORED += [("colocated", "mixtral", "gptq-int8-row")]
ALL_HELD = {"hidden_size": 128, "num_key_value_heads": 4, "shared_expert_intermediate_size": 128, "head_dim": 32}
WIDTHS = {"olmoe": {"intermediate_size": 64}, "mixtral": {"intermediate_size": 80}}
"""MXFP4 needs groups of 32 columns."""


@pytest.mark.parametrize(("layout", "family", "form"), CASES)
def test_greedy_answers_are_the_oracles(tmp_path: Path, layout: str, family: str, form: str) -> None:
    plain = save_checkpoint(tmp_path / "plain", family, seed=11, **WIDTHS.get(family, {}))
    assert_answers_are_the_oracles(tmp_path, plain, layout, form)


@pytest.mark.parametrize(("layout", "family", "form"), STORED)
def test_so_they_are_with_all_layers_as_they_are_stored(tmp_path: Path, layout: str, family: str, form: str) -> None:
    """Attention, shared experts and networks, too."""
    plain = save_checkpoint(tmp_path / "plain", family, seed=11, **ALL_HELD)
    assert_answers_are_the_oracles(tmp_path, plain, layout, form, dense_format="stored")


def assert_answers_are_the_oracles(tmp_path: Path, plain: Path, layout: str, form: str, **more: Any) -> None:
    folder = quantise(plain, tmp_path, FORMATS[form]).folder
    write_digests(folder)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 7, 16, 33, 70, 90)]
    expected = oracles_answers(folder, prompts, 12)
    assert len({token for answer in expected for token in answer}) > 20, "answers too uniform to prove much"
    with bench(tmp_path) as stage:
        options = {"served_model_name": "tiny", "dtype": "float32", "kv_blocks": 128, "max_model_len": 256} | more
        server = stage.serve(folder, **options, **LAYOUTS[layout])
        assert asyncio.run(complete_all(server, prompts, 12)) == expected
        assert ("other linear layers in " in server.proc.log()) == ("dense_format" in more)
        if layout == "apart":
            victim = server.of_role("experts")[0]
            victim.kill()
            until(lambda: len(server.of_role("experts")) == 2, "another one was started")
            until(lambda: server.metric("expertmesh_expert_seats") == 2, "it took the seat's place")
            assert asyncio.run(complete_all(server, prompts, 12)) == expected
