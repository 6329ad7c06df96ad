"""An engine on a GPU sleeps: its memory is free meanwhile, and its answers are the recorded ones afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from testkit.gpu.decode_bench import request, run
from testkit.pocket.answers import END, MAX_TOKENS, POCKET, recorded

from services.attention.sleep import EngineSleep
from services.attention.step.cuda_graphs import CudaCapture
from services.attention.step.engine import Engine, EngineOptions
from services.fabric.local import LocalLink
from services.model.dense import DenseModel
from services.model.experts import ExpertShard
from services.model.load_spec import load_spec
from services.model.sleep import RememberedWeights
from services.model.weight_source import FromCheckpoint
from services.model.weights import load_dense, load_experts

pytestmark = pytest.mark.gpu1
GPU = torch.device("cuda", 0)
LEFT_BYTES = 64 << 20
"""What kernels, streams and small tensors that no sleep frees may take of torch's memory."""


def engine_of(source: RememberedWeights) -> Engine[Any]:
    folder, how = POCKET / "model", {"dtype": torch.float32, "device": GPU, "source": source}
    spec = load_spec(folder)
    model = DenseModel(spec, load_dense(folder, spec, **how))  # type: ignore[arg-type]
    shard = ExpertShard(load_experts(folder, spec, **how), num_experts=spec.num_experts)  # type: ignore[arg-type]
    return Engine(
        model=model,
        link=LocalLink(shard.by_layer(), num_experts=spec.num_experts),
        options=EngineOptions(
            max_num_seqs=48, max_num_batched_tokens=256, kv_blocks=8192, max_model_len=512, lookahead="all"
        ),
        clock=lambda: 0,
        capture=CudaCapture(GPU),
    )


def answers(engine: Engine[Any]) -> dict[str, list[int]]:
    asked = [request(one["id"], one["prompt_ids"], MAX_TOKENS, ignore_eos=False) for one in recorded()[:64]]
    found = run(engine, asked).tokens
    return {name: [token for token in tokens if token != END] for name, tokens in found.items()}


def test_memory_is_free_in_sleep_and_answers_are_the_recorded_ones_after_it() -> None:
    source = RememberedWeights(FromCheckpoint())
    engine = engine_of(source)
    sleep = EngineSleep(engine, source, GPU, engine.prepare)
    engine.prepare()
    wanted = {one["id"]: [token for token in one["output_ids"] if token != END] for one in recorded()[:64]}
    assert answers(engine) == wanted
    graphs, weights = engine.stats().graphs, source.memory().nbytes
    gc.collect()
    torch.cuda.empty_cache()
    before, host = torch.cuda.memory_reserved(GPU), torch.cuda.mem_get_info(GPU)[0]
    for levels in ([1], [2], [1, 2]):
        for level in levels:
            sleep.free(level)
            assert torch.cuda.memory_reserved(GPU) < LEFT_BYTES < before - weights
            assert torch.cuda.mem_get_info(GPU)[0] - host > 0.9 * (before - LEFT_BYTES), "other processes can have it"
        sleep.restore()
        sleep.prepare()
        assert engine.stats().graphs == graphs
        assert answers(engine) == wanted
        assert engine.stats().graph_steps > 0
        assert torch.cuda.memory_reserved(GPU) < 1.1 * before, "nothing is left behind"
