"""How a worker is fitted to its device. There is no GPU: its memory is made up, and its steps run on the CPU."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from torch import Tensor
from unit.attention.conftest import TinyModel

from services.attention.kv_cache import KVCache, block_bytes
from services.attention.service import AttentionService
from services.attention.setup import fit
from services.attention.setup.batch_size import BatchSize
from services.attention.setup.fit import TOKEN_ID_BYTES, Fitting, announce
from services.attention.setup.measure import NoExperts, Prompts, activations
from services.attention.setup.memory_plan import GIB, GRAPHS_BYTES, exchange_demand, experts_demand
from services.config import Settings
from services.errors import ConfigError, OutOfMemory
from services.model.device import into_memory

GPU = torch.device("cuda:0")
TOTAL = 80 * GIB


class MadeUpGpu:
    """Its figures before and after the measured steps: 100 bytes are allocated, and 1,000 at the peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.reserved, self.ooms = 60 * GIB, 15 * GIB, list[int]()
        asked = {
            "empty_cache": lambda: None,
            "mem_get_info": lambda _: (self.free, TOTAL),
            "memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: 100,
            "max_memory_allocated": lambda _: 1100,
            "reset_peak_memory_stats": lambda _: None,
            "memory_stats": lambda _: {"num_ooms": self.ooms.pop(0) if self.ooms else 0},
            "get_device_properties": lambda _: SimpleNamespace(total_memory=TOTAL),
        }
        for name, function in asked.items():
            monkeypatch.setattr(torch.cuda, name, function)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeUpGpu:
    return MadeUpGpu(monkeypatch)


def fitted(tiny: TinyModel, device: torch.device = GPU, **values: Any) -> Fitting:
    settings = Settings(model=tiny.folder, **values)
    return Fitting(settings=settings, spec=tiny.parts.model.spec, device=device, dtype=torch.float32)


class Counted(NoExperts):
    """Notes the rows of each call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.rows.append(len(x_TD))
        return super().dispatch(layer, x_TD, expert_ids_TK, weights_TK)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("step", "longest"), [(64, 512), (96, 40), (16, 512)])
def test_the_measured_steps_are_as_large_as_any(tiny: TinyModel, step: int, longest: int) -> None:
    link, size = Counted(), BatchSize(max_num_seqs=12, max_num_batched_tokens=step)
    found = activations(tiny.parts.model, link, size=size, max_model_len=longest, block_size=4)
    assert found == 1000
    assert max(link.rows) == step, "prompts fill a step, although none is as long"
    assert 12 in link.rows, "all sequences decode at a time"


def test_prompts_have_a_past_where_the_context_allows_one() -> None:
    assert Prompts.filling(64, 100_000) == Prompts(count=1, length=8 * 64)
    assert Prompts.filling(64, 20) == Prompts(count=4, length=17)


def test_steps_that_run_out_of_memory_are_an_error_that_says_what_to_lower(tiny: TinyModel, gpu: MadeUpGpu) -> None:
    gpu.ooms = [3, 4]
    size = BatchSize(max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(OutOfMemory, match="Give --max-num-batched-tokens 32, or lower --max-num-seqs"):
        activations(tiny.parts.model, None, size=size, max_model_len=128, block_size=4)


@pytest.mark.usefixtures("gpu")
def test_without_settings_the_rest_of_the_gpu_is_the_kv_cache(tiny: TinyModel) -> None:
    fitting = fitted(tiny, max_num_batched_tokens=64)
    fitting.check_weights()
    found = fitting.plan(tiny.parts.model, tiny.link())
    graphs = 1000 + GRAPHS_BYTES
    rest = int(0.9 * TOTAL) - 16 * GIB - 1000 - graphs
    each = block_bytes(fitting.spec, block_size=16, dtype=torch.float32) + 8 * 16
    assert found.room.kv_blocks == rest // each
    assert found.kv_bytes <= rest < found.kv_bytes + each
    assert found.measured is not None
    assert (found.measured.demand.activations, found.measured.demand.graphs) == (1000, graphs)
    assert found.size == BatchSize(max_num_seqs=56, max_num_batched_tokens=64)


@pytest.mark.usefixtures("gpu")
def test_a_draft_model_has_its_part_of_a_gpu(tiny: TinyModel) -> None:
    """A second cache with as many blocks, which keeps the ids of its tokens, too, weights, and graphs of its own."""
    alone = fitted(tiny, max_num_batched_tokens=64)
    both = dataclasses.replace(alone, draft=alone.spec)
    plans = [fitting.plan(tiny.parts.model, tiny.link()) for fitting in (alone, both)]
    measured = [plan.measured for plan in plans]
    graphs = [0 if found is None else found.demand.graphs for found in measured]
    assert graphs == [1000 + GRAPHS_BYTES, 1000 + 2 * GRAPHS_BYTES]
    each = block_bytes(alone.spec, block_size=16, dtype=torch.float32) + 16 * TOKEN_ID_BYTES
    assert plans[1].room.kv_blocks == pytest.approx((plans[0].room.kv_blocks - GRAPHS_BYTES / each) / 2, abs=1)
    weights = alone._weights()
    assert both._weights() == 2 * weights
    elsewhere = dataclasses.replace(both, settings=Settings(layout="colocated", workers=2))
    assert weights < elsewhere._weights() < 2 * weights, "experts of the draft model are here in any case"


def test_a_kv_cache_for_two_models_says_so_where_it_is_too_small(tiny: TinyModel) -> None:
    alone = fitted(tiny, torch.device("cpu"))
    each = block_bytes(alone.spec, block_size=16, dtype=torch.float32)
    settings = Settings(model=tiny.folder, kv_memory_gib=1.5 * each / 2**30)
    alone = dataclasses.replace(alone, settings=settings)
    assert alone.given().room.kv_blocks == 1
    with pytest.raises(ConfigError, match="one KV block, which, with that of the draft model's cache, takes"):
        dataclasses.replace(alone, draft=alone.spec).given()
    roomy = dataclasses.replace(alone, settings=settings.model_copy(update={"kv_memory_gib": 9 * each / 2**30}))
    found = dataclasses.replace(roomy, draft=alone.spec).given()
    assert (found.room.kv_blocks, found.kv_bytes) == (4, 8 * each)


@pytest.mark.usefixtures("gpu")
def test_a_divided_gpu_is_divided(tiny: TinyModel) -> None:
    whole = fitted(tiny, max_num_batched_tokens=64).plan(tiny.parts.model, tiny.link())
    settings = {"gpu_workers": 2, "gpu_reserved_gib": 4.0, "gpu_memory_utilization": 0.8}
    half = fitted(tiny, max_num_batched_tokens=64, **settings).plan(tiny.parts.model, tiny.link())
    assert half.kv_bytes < whole.kv_bytes
    assert half.kv_bytes == pytest.approx((0.8 * TOTAL - 4 * GIB) / 2 - 16 * GIB - 2000 - GRAPHS_BYTES, abs=1 << 20)


@pytest.mark.usefixtures("gpu")
def test_what_is_elsewhere_is_added_by_its_shapes(tiny: TinyModel) -> None:
    spec = tiny.parts.model.spec
    shapes = {"hidden": spec.hidden_size, "slots": spec.top_k, "itemsize": 4}
    demands = {}
    for layout in ("disaggregated", "colocated", "lockstep"):
        values = {"layout": layout, "workers": 3} if layout != "disaggregated" else {"layout": layout}
        found = fitted(tiny, max_num_batched_tokens=64, **values).plan(tiny.parts.model, None).measured
        assert found is not None
        demands[layout] = found.demand
    experts = experts_demand(128, width=spec.expert_ffn, **shapes)
    assert demands["disaggregated"].exchange == exchange_demand(64, peers=1, **shapes)
    assert demands["colocated"].exchange == exchange_demand(64, peers=3, **shapes)
    assert demands["lockstep"].exchange == demands["lockstep"].graphs == 0
    assert [demand.activations for demand in demands.values()] == [1000, 1000 + experts, 1000 + experts]


@pytest.mark.parametrize("values", [{"kv_memory_gib": 0.25}, {"kv_blocks": 7}])
def test_a_kv_cache_that_is_given_wins_and_nothing_is_measured(
    tiny: TinyModel, gpu: MadeUpGpu, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    monkeypatch.setattr(fit, "activations", lambda *_, **__: pytest.fail("it was measured"))
    gpu.free = 0
    fitting = fitted(tiny, **values, max_num_seqs=5)
    fitting.check_weights()
    found = fitting.plan(tiny.parts.model, tiny.link())
    assert found.room.kv_blocks == values.get(
        "kv_blocks", 2**28 // block_bytes(fitting.spec, block_size=16, dtype=torch.float32)
    )
    assert found.size.max_num_seqs == 5
    assert found.line().startswith("memory plan: KV cache ")
    assert fitted(tiny, **values, max_num_batched_tokens=8192).given().size.max_num_seqs >= 64


def test_on_a_cpu_the_kv_cache_has_a_gib_and_nothing_else_changes(tiny: TinyModel) -> None:
    found = fitted(tiny, torch.device("cpu")).plan(tiny.parts.model, tiny.link())
    assert found.size == BatchSize(max_num_seqs=64, max_num_batched_tokens=512)
    assert (
        found.kv_bytes <= GIB < found.kv_bytes + block_bytes(tiny.parts.model.spec, block_size=16, dtype=torch.float32)
    )


@pytest.mark.usefixtures("gpu")
def test_weights_that_do_not_fit_are_refused_before_they_are_read(tiny: TinyModel, gpu: MadeUpGpu) -> None:
    gpu.free = gpu.reserved = 0
    with pytest.raises(OutOfMemory, match=r"The weights of this worker take 0\.0 GiB.*Other processes hold 79\.0 GiB"):
        fitted(tiny).check_weights()


def test_the_plan_is_logged_with_what_it_does_not_allow(tiny: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan = fitted(tiny, torch.device("cpu"), kv_blocks=2).plan(tiny.parts.model, tiny.link())
    announce(plan, 512)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert plan.line() in caplog.text
    assert "longer requests will be rejected; raise --kv-memory-gib or --gpu-memory-utilization" in caplog.text


def test_a_kv_cache_larger_than_the_gpu_says_how_large_it_may_be(
    tiny: TinyModel, gpu: MadeUpGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.free = 20 * GIB

    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(OutOfMemory, match=r"Lower --kv-memory-gib to at most 16, or leave it out\."):
        KVCache(tiny.parts.model.spec, num_blocks=9, block_size=16, dtype=torch.float32, device=GPU)


async def test_a_colocated_worker_waits_for_its_experts_before_it_takes_the_rest(tiny: TinyModel) -> None:
    """Which its own process loads meanwhile, onto the same GPU."""
    awaited = [False, False, True]
    settings = Settings(model=tiny.folder)
    service = AttentionService(settings, Redis(), CollectorRegistry(), experts_loaded=lambda: awaited.pop(0))
    service._wait_for_experts()
    assert not awaited


def test_memory_that_runs_out_while_weights_are_loaded_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"ran out while weights were loaded.*--layout colocated"), into_memory(GPU):
        raise torch.OutOfMemoryError("CUDA out of memory")
