"""An engine on a GPU gives the recorded answers, by CUDA graphs and eagerly, with steps launched ahead and without."""

from __future__ import annotations

import pytest
import torch
from testkit.gpu.decode_bench import Parts, load, request, run
from testkit.pocket.answers import END, MAX_TOKENS, POCKET, recorded

from services.attention.step.cuda_graphs import CudaCapture
from services.attention.step.pipeline import Lookahead

pytestmark = pytest.mark.gpu1
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def pocket() -> Parts:
    return load(POCKET / "model", GPU, torch.float32)


@pytest.mark.parametrize("lookahead", ["off", "all"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eagerly", "by graph"])
def test_answers_are_the_recorded_ones(pocket: Parts, graphs: bool, lookahead: Lookahead) -> None:
    engine = pocket.engine(
        CudaCapture(GPU) if graphs else None, max_num_seqs=48, max_num_batched_tokens=256, kv_blocks=1024,
        max_model_len=512, lookahead=lookahead,
    )  # fmt: skip
    engine.prepare()
    wanted = recorded()
    found = run(engine, [request(one["id"], one["prompt_ids"], MAX_TOKENS, ignore_eos=False) for one in wanted])
    for one in wanted:
        assert _said(found.tokens[one["id"]]) == _said(one["output_ids"]), one["id"]
    stats = engine.stats()
    assert (stats.graph_steps > 0) == graphs
    assert (stats.steps_ahead > 0) == (lookahead == "all")


def _said(token_ids: list[int]) -> list[int]:
    return [token for token in token_ids if token != END]
