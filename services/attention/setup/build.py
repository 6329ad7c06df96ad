"""Builds an engine from a checkpoint and settings, with its experts in this process or behind a link."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from services.attention.engine_thread import SteppedEngine
from services.attention.setup.drafts import Draft, LoadedDraft
from services.attention.setup.fit import Fitting, announce
from services.attention.setup.remote_link import remote_link
from services.attention.setup.supported import check_supported
from services.attention.setup.worker_plan import WorkerPlan
from services.attention.step.cuda_graphs import CudaCapture
from services.attention.step.engine import Engine, EngineOptions, EngineTracing
from services.attention.step.overlap import OverlapPolicy
from services.attention.step.pipeline import Lookahead
from services.config import Settings
from services.fabric.link import CountingLink, ExpertLink, RemoteLink
from services.fabric.local import LocalLink
from services.fabric.shared_memory.link import SharedMemoryLink
from services.metrics import CHECKPOINT
from services.model.dense import DenseModel
from services.model.device import check_device, into_memory, serving_dtype, torch_device
from services.model.experts import ExpertShard
from services.model.products import Products, products_of
from services.model.progress import Progress, loading_progress
from services.model.spec import ModelSpec
from services.model.weight_source import FromCheckpoint, WeightSource
from services.model.weights import load_dense, load_experts
from services.runtime.tracing import Tracer

EngineT = TypeVar("EngineT", bound=SteppedEngine)

PREFILL_STRETCH = 2.0
"""A step with prompts takes at most so many times as long as one of the same decodes without."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model, and how this worker serves it: all that is known before any weights are read."""

    folder: Path
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    fitting: Fitting
    products: Products
    """How rows are multiplied, by the model and by experts in this process."""
    weights: WeightSource = field(default_factory=FromCheckpoint)
    draft: Draft | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Built(Generic[EngineT]):
    """An engine, and what its worker needs to know of it."""

    served: ServedModel
    plan: WorkerPlan
    engine: EngineT
    link: CountingLink[Any]
    remote: RemoteLink | None = None
    """``link`` again, if it leads to experts in other processes."""
    sharing: SharedMemoryLink | None = None
    """``link`` again, if it shares memory with experts in other processes."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that loading weights took, by where they came from."""


def build(
    settings: Settings,
    clock: Callable[[], int],
    *,
    worker: str,
    colocated: bool = False,
    wait: Callable[[], None] = lambda: None,
    tracer: Tracer | None = None,
    weights: WeightSource | None = None,
) -> Built[Engine[Any]]:
    """Load the checkpoint and build its engine. Takes as long as reading the weights, and seconds more on a GPU.

    Args:
        clock: returns the time of Redis in milliseconds.
        worker: the worker's incarnation.
        colocated: an expert worker runs in this process, on the same device.
        wait: returns once that one has loaded its experts; called before the KV cache takes the rest of a GPU.
        tracer: None where nothing is traced.
        weights: by default the checkpoint; experts of other processes have their own.

    Raises:
        OutOfMemory: the device is too small for what was asked.
        ConfigError: options contradict each other, the model or the machine.
        CheckpointError: the checkpoint is damaged or not supported.
    """
    served = served_model(settings, weights=weights)
    spec, dtype, device = served.spec, served.dtype, served.device
    remote, began = None, time.monotonic()
    with loading_progress(log) as progress, into_memory(device):
        model, draft = load_model(served, progress), load_draft(served, progress)
        if settings.layout == "local":
            link: CountingLink[Any] = _local_link(served, progress)
        else:
            size = served.fitting.size()
            link = remote = remote_link(settings, spec, dtype, device, worker, size=size, colocated=colocated)
    load_s: dict[str, float] = {CHECKPOINT: time.monotonic() - began}
    if served.fitting.measures:
        _waited(wait, remote)
    plan = worker_plan(served, model, None if remote else link)
    sharing = remote if isinstance(remote, SharedMemoryLink) else None
    overlap = OverlapPolicy(
        settings.overlap if remote else "off",  # experts in this process leave nothing to hide
        tokens_per_row=spec.hidden_size * (1 + spec.kv_size / spec.q_size),  # of projections over those of attention
        waits_seen=sharing is None,  # with shared memory the device waits, not the host
    )
    options = engine_options(
        settings, plan, lookahead=_lookahead(settings, device), prefill_stretch=_prefill_stretch(settings, device)
    )
    capture = CudaCapture(device) if device.type == "cuda" and not settings.enforce_eager else None
    engine = Engine(
        model=model,
        link=link,
        options=options,
        clock=clock,
        overlap=overlap,
        capture=capture,
        tracing=None if tracer is None else EngineTracing(tracer, remote),
        drafter=None if draft is None else draft.drafter(options, capture),
    )
    return Built(served=served, plan=plan, engine=engine, link=link, remote=remote, sharing=sharing, load_s=load_s)


def _waited(wait: Callable[[], None], remote: RemoteLink | None) -> None:
    try:
        wait()
    except BaseException:
        if remote is not None:
            remote.close()
        raise


def _lookahead(settings: Settings, device: torch.device) -> Lookahead:
    """Return after which steps the next one is launched early: all where no step waits for the host."""
    if settings.enforce_eager:
        return "off"
    return "all" if settings.layout == "local" and device.type == "cuda" else "replayed"


def _prefill_stretch(settings: Settings, device: torch.device) -> float | None:
    """Return how much longer prompts may make steps beside decodes. A size of steps that is asked for is kept."""
    return PREFILL_STRETCH if device.type == "cuda" and settings.max_num_batched_tokens is None else None


def served_model(settings: Settings, *, rank: int | None = None, weights: WeightSource | None = None) -> ServedModel:
    """Decide what is computed here, and where. Reads no more than a sample of the weights.

    Args:
        rank: number among attention workers that each take one GPU, see :func:`services.model.device.torch_device`.
        weights: by default the checkpoint.

    Raises:
        OutOfMemory: the weights are larger than the device's memory.
        UnfitDevice: the device cannot compute this model.
        ConfigError: options contradict each other, the model or the machine.
        CheckpointError: the checkpoint is damaged or not supported.
    """
    assert settings.model is not None, "load_settings requires it of this role"
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    weights = weights or FromCheckpoint()
    spec = weights.spec(settings.model, settings.held_experts, settings.dense_format)
    device = torch_device(settings.device, rank=rank)
    log.info("computing attention on %s", device)
    dtype = serving_dtype(settings.dtype, spec)
    check_device(device, dtype)
    check_supported(settings, spec, on_cpu=device.type == "cpu")
    draft = Draft.of(settings, spec)
    fitting = Fitting(
        settings=settings, spec=spec, device=device, dtype=dtype, draft=None if draft is None else draft.spec
    )
    log.info("experts are held %s, other linear layers %s", spec.experts.title, spec.linears.title)
    if fitting.measures:
        fitting.check_weights()
    else:
        fitting.given()
    return ServedModel(
        folder=settings.model,
        spec=spec,
        device=device,
        dtype=dtype,
        fitting=fitting,
        products=products_of(batch_invariant=settings.batch_invariant),
        weights=weights,
        draft=draft,
    )


def load_model(served: ServedModel, progress: Progress) -> DenseModel:
    """Read everything but the experts."""
    dense = load_dense(
        served.folder,
        served.spec,
        dtype=served.dtype,
        device=served.device,
        progress=progress,
        source=served.weights,
    )
    return DenseModel(served.spec, dense, served.products)


def load_draft(served: ServedModel, progress: Progress) -> LoadedDraft | None:
    """Read the model that drafts, if there is one."""
    if served.draft is None:
        return None
    return served.draft.load(
        dtype=served.dtype,
        device=served.device,
        progress=progress,
        source=served.weights,
    )


def worker_plan(served: ServedModel, model: DenseModel, link: ExpertLink[Any] | None) -> WorkerPlan:
    """Return what this worker does with its memory, and log it. See :meth:`Fitting.plan`."""
    plan = served.fitting.plan(model, link)
    announce(plan, served.spec.max_position)
    return plan


def engine_options(
    settings: Settings, plan: WorkerPlan, *, lookahead: Lookahead, prefill_stretch: float | None = None
) -> EngineOptions:
    """Return the options of an engine by ``plan``, and what else ``settings`` ask for."""
    return EngineOptions(
        max_num_seqs=plan.size.max_num_seqs,
        max_num_batched_tokens=plan.size.max_num_batched_tokens,
        max_model_len=plan.room.max_model_len,
        kv_blocks=plan.room.kv_blocks,
        block_size=settings.block_size,
        prefix_cache=settings.prefix_cache,
        prefix_cache_scope=settings.prefix_cache_scope,
        lookahead=lookahead,
        prefill_stretch=prefill_stretch,
        speculative_config=settings.speculation,
    )


def _local_link(served: ServedModel, progress: Progress) -> LocalLink:
    spec = served.spec
    experts = load_experts(
        served.folder, spec, dtype=served.dtype, device=served.device, progress=progress, source=served.weights
    )
    shard = ExpertShard(
        experts, num_experts=spec.num_experts, products=served.products, activation=spec.expert_activation
    )
    return LocalLink(shard.by_layer(), num_experts=spec.num_experts)
