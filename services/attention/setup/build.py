"""From a checkpoint and settings to an engine that is ready to step, its experts in this process or behind a link."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.attention.kv_cache import blocks_within
from services.attention.lockstep_engine import LockstepEngine, LockstepRank
from services.attention.setup.capacity import Capacity, capacity
from services.attention.setup.remote_link import remote_link
from services.attention.step.cuda_graphs import CudaCapture
from services.attention.step.engine import Engine, EngineOptions
from services.attention.step.overlap import OverlapPolicy
from services.config import Settings
from services.fabric.link import CountingLink
from services.fabric.local import LocalLink
from services.fabric.shared_memory.link import SharedMemoryLink
from services.model.dense import DenseModel
from services.model.device import serving_dtype, torch_device
from services.model.experts import ExpertShard
from services.model.load_spec import load_spec
from services.model.progress import loading_progress
from services.model.spec import ModelSpec
from services.model.weights import load_dense, load_experts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """An engine with what others need to know about it."""

    spec: ModelSpec
    capacity: Capacity
    engine: Engine[Any] | LockstepEngine
    link: CountingLink[Any]
    lockstep: LockstepRank | None = None
    """The other ranks, where they share the experts."""


def build(settings: Settings, clock: Callable[[], int], *, worker: str, beside_experts: bool = False) -> Built:
    """Load the checkpoint and build its engine. Takes as long as reading the weights; ``worker`` is the incarnation,
    ``beside_experts`` as :func:`services.attention.setup.remote_link.remote_link` says.

    Raises:
        ConfigError: options contradict each other, the model or the machine.
        CheckpointError: the checkpoint is damaged or not supported.
        LockstepBroken: the ranks that share the experts have to start again.
    """
    assert settings.model is not None, "load_settings requires it of this role"
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    spec = load_spec(settings.model)
    ranks = settings.layout == "lockstep"
    device = torch_device(settings.device, rank=settings.rank if ranks else None)
    log.info("attention is computed on %s", device)
    dtype = serving_dtype(settings.dtype, spec)
    room = _capacity(settings, spec, dtype)
    lockstep = LockstepRank(settings, spec, dtype=dtype, device=device) if ranks else None
    with loading_progress(log) as progress:
        dense = load_dense(settings.model, spec, dtype=dtype, device=device, progress=progress)
        link: CountingLink[Any]
        if settings.uses_seats:
            link = remote_link(settings, spec, dtype, device, worker, beside_experts=beside_experts)
        elif lockstep is not None:
            link = lockstep.connect(worker, progress)
        else:
            experts = load_experts(settings.model, spec, dtype=dtype, device=device, progress=progress)
            shard = ExpertShard(experts, num_experts=spec.num_experts)
            link = LocalLink(shard.by_layer(), num_experts=spec.num_experts)
    model, options = DenseModel(spec, dense), _engine_options(settings, room)
    if lockstep is not None:  # ranks in lock-step must cut their steps alike: no overlap, and no lookahead
        engine: Engine[Any] = Engine(model=model, link=link, options=options, clock=clock)
        return Built(spec=spec, capacity=room, engine=LockstepEngine(engine, lockstep), link=link, lockstep=lockstep)
    capture = CudaCapture(device) if device.type == "cuda" and not settings.enforce_eager else None
    engine = Engine(
        model=model, link=link, options=options, clock=clock, overlap=_overlap(settings, spec, link), capture=capture
    )
    return Built(spec=spec, capacity=room, engine=engine, link=link)


def _capacity(settings: Settings, spec: ModelSpec, dtype: torch.dtype) -> Capacity:
    blocks = settings.kv_blocks or blocks_within(
        settings.kv_memory_gib, spec, block_size=settings.block_size, dtype=dtype
    )
    room = capacity(
        kv_blocks=blocks, block_size=settings.block_size, asked=settings.max_model_len, max_position=spec.max_position
    )
    if room.lowered:
        log.warning(
            "the %d KV blocks hold %d tokens, less than the model's %d: longer requests are refused; "
            "give more --kv-memory-gib, or set --max-model-len",
            room.kv_blocks,
            room.kv_tokens,
            spec.max_position,
        )
    return room


def _overlap(settings: Settings, spec: ModelSpec, link: CountingLink[Any]) -> OverlapPolicy:
    """Experts in this process leave nothing to hide."""
    return OverlapPolicy(
        settings.overlap if settings.uses_seats else "off",
        tokens_per_row=spec.hidden_size * (1 + spec.kv_size / spec.q_size),  # of projections over those of attention
        waits_seen=not isinstance(link, SharedMemoryLink),  # there the device waits, not the host
    )


def _engine_options(settings: Settings, room: Capacity) -> EngineOptions:
    each_step_alone = settings.enforce_eager or settings.layout == "lockstep"
    return EngineOptions(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=room.max_model_len,
        kv_blocks=room.kv_blocks,
        block_size=settings.block_size,
        prefix_cache=settings.prefix_cache,
        prefix_cache_scope=settings.prefix_cache_scope,
        lookahead="off" if each_step_alone else "replayed",
    )
