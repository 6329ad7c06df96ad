"""What recurrent layers change before anything runs: options that are refused by name, and the memory of states."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from testkit.models.checkpoints import save_checkpoint
from unit.attention.test_fit import MadeUpGpu

from services.attention.setup import fit
from services.attention.setup.batch_size import BatchSize
from services.attention.setup.build import served_model
from services.attention.setup.fit import Fitting
from services.attention.setup.memory_plan import GIB, Demand, GpuMemory, KVShape, Share
from services.attention.setup.worker_plan import Asked, Measured, WorkerPlan, fitting
from services.config import Settings
from services.errors import ConfigError
from services.model.load_spec import load_spec
from services.model.state_room import FIRST_SLOT, STATES_PER_SEQUENCE, state_room, state_slots
from services.supervisor.gpus import Gpus
from services.supervisor.preflight import Preview, preflight

CPU, EACH = torch.device("cpu"), STATES_PER_SEQUENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("recurrent"), "qwen3_next")


def preview(folder: Path, **values: Any) -> Preview:
    return preflight(Settings(model=folder, **values), lambda: Gpus())


REFUSED: dict[str, dict[str, Any]] = {
    "--speculative-config": {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3})},
    "--batch-invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_states_do_not_have_are_refused_by_name(folder: Path, tmp_path: Path, option: str) -> None:
    for starts in (lambda settings: served_model(settings), lambda settings: preflight(settings, lambda: Gpus())):
        with pytest.raises(ConfigError, match=rf'{option} cannot be used: the model \("qwen3_next"\) has 1 recurrent'):
            starts(Settings(model=folder, device="cpu", **REFUSED[option]))
    plain = save_checkpoint(tmp_path, "qwen3_moe")
    served_model(Settings(model=plain, device="cpu", **REFUSED[option]))


def test_pages_are_of_layers_with_attention_alone(folder: Path) -> None:
    spec = load_spec(folder)
    assert spec.kv_bytes(4) == 2 * 1 * 2 * 24 * 4
    channels = 2 * 2 * 38 + 6 * 14
    assert spec.state_bytes == 4 * (3 * channels + 6 * 38 * 14)


def test_states_take_half_of_the_memory_at_most(folder: Path) -> None:
    spec = load_spec(folder)
    memory = 2 * (5 * EACH + FIRST_SLOT) * spec.state_bytes
    assert state_room(spec, 64, asked=False, memory=memory).max_num_seqs == 5
    assert state_room(spec, 64, asked=False, memory=memory).nbytes == memory // 2
    assert state_room(spec, 3, asked=False, memory=memory).max_num_seqs == 3
    assert state_room(spec, 64, asked=True, memory=None).max_num_seqs == 64
    with pytest.raises(ConfigError, match=r"states of 6 sequences take .* Lower --max-num-seqs to at most 5"):
        state_room(spec, 6, asked=True, memory=memory)
    with pytest.raises(ConfigError, match=r"states of 1 sequences take .* Raise --kv-memory-gib"):
        state_room(spec, 6, asked=False, memory=spec.state_bytes)


def test_what_states_take_is_not_the_kv_caches(folder: Path) -> None:
    """A worker and the preview of `serve` say the same."""
    spec, gib = load_spec(folder), 0.005
    settings = Settings(model=folder, kv_memory_gib=gib, block_size=16)
    plan = Fitting(settings=settings, spec=spec, device=CPU, dtype=torch.float32).given()
    found = preview(folder, kv_memory_gib=gib, block_size=16, device="cpu")
    assert plan.size.max_num_seqs == (int(gib * GIB) // 2 // spec.state_bytes - FIRST_SLOT) // EACH < 64
    assert plan.state_bytes == (state_slots(spec, plan.size.max_num_seqs) + FIRST_SLOT) * spec.state_bytes
    assert plan.kv_bytes + plan.state_bytes <= gib * GIB < plan.kv_bytes + plan.state_bytes + 16 * spec.kv_bytes(4)
    assert (found.room, found.size, found.kv_bytes) == (plan.room, plan.size, plan.kv_bytes)
    assert "recurrent states 0.0 GiB, 0.0156 MB each" in plan.line()
    assert any("recurrent layers: 0.0149 MiB for each state, of which" in line for line in found.lines())


@pytest.mark.parametrize("seqs", [None, 18])
def test_the_memory_that_is_advised_for_a_length_has_room_for_states(
    folder: Path, tmp_path: Path, seqs: int | None
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path)

    def given(gib: float) -> WorkerPlan:
        settings = Settings(model=tmp_path, max_model_len=4000, max_num_seqs=seqs, kv_memory_gib=gib)
        return Fitting(settings=settings, spec=spec, device=CPU, dtype=torch.float32).given()

    with pytest.raises(ConfigError, match="does not fit") as error:
        given(0.0022)
    [advised] = re.findall(r"--kv-memory-gib ([0-9.]+)", str(error.value))
    assert given(float(advised)).room.max_model_len == 4000


def test_blocks_that_are_given_are_beside_states(folder: Path) -> None:
    settings = Settings(model=folder, kv_blocks=12, max_num_seqs=5)
    plan = Fitting(settings=settings, spec=load_spec(folder), device=CPU, dtype=torch.float32).given()
    assert (plan.room.kv_blocks, plan.size.max_num_seqs) == (12, 5)


def test_on_a_gpu_states_are_planned_before_steps_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many sequences as have states in half of what weights leave are measured; the KV cache gets the rest."""
    gpu, spec, measured = MadeUpGpu(monkeypatch), load_spec(folder), list[int]()
    gpu.free, gpu.reserved = 78 * GIB, 79 * GIB - (spec.state_bytes * 2 * (9 * EACH + FIRST_SLOT))
    settings = Settings(model=folder, gpu_memory_utilization=0.995, max_num_batched_tokens=64)
    fitting = Fitting(settings=settings, spec=spec, device=torch.device("cuda:0"), dtype=torch.float32)

    def activations(*_: Any, size: Any, **__: Any) -> int:
        measured.append(size.max_num_seqs)
        return 0

    monkeypatch.setattr(fit, "activations", activations)
    monkeypatch.setattr(fit, "fitting", lambda size, _asked, found, *_: (size, found.demand))
    size, demand = fitting._measured(None, None)  # type: ignore[arg-type,misc]
    assert demand.states == (EACH * size.max_num_seqs + FIRST_SLOT) * spec.state_bytes > 0
    assert demand.total >= demand.states
    assert measured == [size.max_num_seqs]


def test_a_plan_counts_states_beside_pages(folder: Path) -> None:
    from argparse import Namespace

    from services.planner.estimate import kv_bytes

    spec = load_spec(folder)
    states = EACH * spec.state_bytes
    assert kv_bytes(spec, Namespace(context=16)) == 2 * states, "half is left to pages, however few there are"
    one, more = (kv_bytes(spec, Namespace(context=context)) for context in (1600, 16_000))
    assert one - states == (more - states) / 10


def test_states_are_those_of_the_batch_that_the_cache_has_room_for(folder: Path) -> None:
    states = load_spec(folder).state_bytes
    found = Measured(
        memory=GpuMemory(total=80 * GIB, free=78 * GIB, allocated=0),
        share=Share(utilization=0.9),
        demand=Demand(activations=60 * GIB, states=(EACH * 512 + FIRST_SLOT) * states),
    )
    size = BatchSize(max_num_seqs=512, max_num_batched_tokens=64)
    asked = Asked(max_model_len=None, max_num_seqs=None)
    plan = fitting(size, asked, found, KVShape(block_size=16, block_bytes=GIB // 16), 4096)
    assert 1 < plan.size.max_num_seqs < 512
    assert plan.state_bytes == (EACH * plan.size.max_num_seqs + FIRST_SLOT) * states
    assert f"{states / 1e6:.3g} MB each" in plan.line()
