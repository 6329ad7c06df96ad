"""From a checkpoint and settings to an engine that is ready to step, with all experts in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.attention.cache import blocks_within
from services.attention.capacity import Capacity, capacity
from services.attention.engine import Engine, EngineOptions
from services.config import Settings
from services.errors import ConfigError
from services.fabric.local import LocalHandle, LocalLink
from services.model.dense import DenseModel
from services.model.experts import ExpertShard
from services.model.progress import loading_progress
from services.model.spec import ModelSpec, load_spec
from services.model.weights import load_dense, load_experts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """An engine with what others need to know about it."""

    spec: ModelSpec
    capacity: Capacity
    engine: Engine[LocalHandle]
    link: LocalLink


def build(settings: Settings, clock: Callable[[], int]) -> Built:
    """Load the checkpoint and build its engine. Takes as long as reading the weights.

    Raises:
        ConfigError: options contradict each other, the model or the machine.
        CheckpointError: the checkpoint is damaged or not supported.
    """
    assert settings.model is not None, "load_settings requires it of this role"
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    spec = load_spec(settings.model)
    device = torch_device(settings.device)
    dtype = getattr(torch, spec.dtype if settings.dtype == "auto" else settings.dtype)
    room = _capacity(settings, spec, dtype)
    model, link = _load(settings.model, spec, dtype, device)
    engine = Engine(model=model, link=link, options=_engine_options(settings, room), clock=clock)
    return Built(spec=spec, capacity=room, engine=engine, link=link)


def torch_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}.", hint="Try --device cpu or auto.") from error
    return device


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
            "give more --kv-blocks or --kv-memory-gib, or set --max-model-len",
            room.kv_blocks,
            room.kv_tokens,
            spec.max_position,
        )
    return room


def _load(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[DenseModel, LocalLink]:
    with loading_progress(log) as progress:
        dense = load_dense(folder, spec, dtype=dtype, device=device, progress=progress)
        experts = load_experts(folder, spec, dtype=dtype, device=device, progress=progress)
    shard = ExpertShard(experts, num_experts=spec.num_experts)
    return DenseModel(spec, dense), LocalLink(shard.by_layer(), num_experts=spec.num_experts)


def _engine_options(settings: Settings, room: Capacity) -> EngineOptions:
    return EngineOptions(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=room.max_model_len,
        kv_blocks=room.kv_blocks,
        block_size=settings.block_size,
        prefix_cache=settings.prefix_cache,
        chunked_prefill=settings.chunked_prefill,
    )
