"""Fits a worker to its device: batch and KV cache, as the settings say or as the memory allows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from services.attention.kv_cache import block_bytes, blocks_within
from services.attention.setup.batch_size import WITHOUT_GPU, BatchSize, batch_size
from services.attention.setup.capacity import USUAL_KV_GIB, Capacity, capacity
from services.attention.setup.measure import activations, gpu_memory
from services.attention.setup.memory_plan import (
    GIB,
    Demand,
    KVShape,
    Share,
    check_weights,
    exchange_demand,
    experts_demand,
    graphs_demand,
    left_to_cache,
)
from services.attention.setup.recurrent import beside_states, state_bytes_beside
from services.attention.setup.worker_plan import Asked, Measured, WorkerPlan, crowd, fitting
from services.config import Settings
from services.fabric.link import ExpertLink
from services.model.dense import DenseModel
from services.model.held_experts import expert_bytes
from services.model.held_linears import dense_bytes
from services.model.spec import ModelSpec
from services.model.state_room import state_nbytes

TOKEN_ID_BYTES = 8
"""Bytes of a slot of the KV cache for the id of its token."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """How one worker is fitted to ``device``, by its settings and its model."""

    settings: Settings
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    draft: ModelSpec | None = None
    """The model that drafts: its weights, and a cache with as many blocks, are in this process, too."""

    @property
    def measures(self) -> bool:
        """Whether the KV cache takes the memory that is left of a GPU."""
        given = self.settings.kv_blocks is not None or self.settings.kv_memory_gib is not None
        return self.device.type == "cuda" and not given

    def size(self) -> BatchSize:
        """Return the batch, which may have fewer sequences once the KV cache is known."""
        settings = self.settings
        total = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None
        tokens = settings.max_num_batched_tokens
        if tokens is None and settings.layout == "lockstep":  # where all ranks wait for the longest step
            tokens = WITHOUT_GPU.max_num_batched_tokens
        return batch_size(seqs=settings.max_num_seqs, tokens=tokens, gpu_bytes=total)

    def check_weights(self) -> None:
        """Refuse weights that the GPU has no room for. Raises OutOfMemory."""
        if self.measures:
            check_weights(gpu_memory(self.device), self._share(), self._weights())

    def given(self) -> WorkerPlan:
        """Return the plan where the settings, or the defaults of CPUs, give the KV cache.

        Raises:
            ConfigError: it holds less than the settings ask for.
        """
        settings, shape = self.settings, self._shape()
        usual, size = USUAL_KV_GIB if settings.kv_memory_gib is None else settings.kv_memory_gib, self.size()
        seqs, asked = size.max_num_seqs, settings.max_num_seqs is not None
        if settings.kv_blocks is None:
            size, usual = self._beside_states(size, usual)
        blocks = settings.kv_blocks or blocks_within(
            usual, self.spec, block_size=settings.block_size, dtype=self.dtype, draft=self.draft
        )
        room = capacity(
            kv_blocks=blocks,
            block_size=shape.block_size,
            block_bytes=shape.block_bytes,
            asked=settings.max_model_len,
            max_position=self.spec.max_position,
            beside=lambda pages: state_bytes_beside(self.spec, seqs, pages, asked=asked),
        )
        size = crowd(size, self._asked(), room)
        return WorkerPlan(
            room=room,
            size=size,
            kv_bytes=blocks * shape.block_bytes,
            state_bytes=state_nbytes(self.spec, size.max_num_seqs),
        )

    def _beside_states(self, size: BatchSize, memory_gib: float) -> tuple[BatchSize, float]:
        return beside_states(self.spec, size, memory_gib, asked=self.settings.max_num_seqs is not None)

    def plan(self, model: DenseModel, link: ExpertLink[Any] | None) -> WorkerPlan:
        """Return the plan of a worker whose weights are loaded. Measures steps, where the GPU's rest is the KV cache's.

        Args:
            link: reaches experts in this process; None: they are elsewhere, or cannot be asked yet.

        Raises:
            ConfigError: the memory does not suffice.
        """
        return self._measured(model, link) if self.measures else self.given()

    def _measured(self, model: DenseModel, link: ExpertLink[Any] | None) -> WorkerPlan:
        settings, size = self.settings, self.size()
        size, _ = self._beside_states(size, left_to_cache(gpu_memory(self.device), self._share()) / GIB)
        longest = min(settings.max_model_len or self.spec.max_position, self.spec.max_position)
        peak = activations(model, link, size=size, max_model_len=longest, block_size=settings.block_size)
        found = Measured(
            memory=gpu_memory(self.device),
            share=self._share(),
            demand=self._demand(peak, size),
        )
        shape, ids = self._shape(), TOKEN_ID_BYTES * len(self._models)
        shape = KVShape(block_size=shape.block_size, block_bytes=shape.block_bytes + ids * shape.block_size)
        return fitting(size, self._asked(), found, shape, self.spec.max_position)

    def _demand(self, peak: int, size: BatchSize) -> Demand:
        settings, spec, itemsize, rows = self.settings, self.spec, self.dtype.itemsize, size.max_num_batched_tokens
        captured = not settings.enforce_eager and settings.layout != "lockstep"
        exchange = experts = 0
        if settings.uses_seats:
            peers = max(1, settings.seats)
            exchange = exchange_demand(rows, hidden=spec.hidden_size, slots=spec.top_k, itemsize=itemsize, peers=peers)
        if settings.layout in ("colocated", "lockstep"):  # which compute the rows of other workers, too
            experts = experts_demand(
                2 * rows, hidden=spec.hidden_size, width=spec.expert_ffn, slots=spec.top_k, itemsize=itemsize
            )
        return Demand(
            activations=peak + experts,
            graphs=graphs_demand(peak, captured=captured, models=len(self._models)),
            exchange=exchange,
            states=state_nbytes(spec, size.max_num_seqs),
        )

    def _asked(self) -> Asked:
        return Asked(max_model_len=self.settings.max_model_len, max_num_seqs=self.settings.max_num_seqs)

    def _share(self) -> Share:
        settings = self.settings
        return Share(
            utilization=settings.gpu_memory_utilization,
            workers=settings.gpu_workers,
            reserved=int(settings.gpu_reserved_gib * 2**30),
        )

    def _shape(self) -> KVShape:
        size = self.settings.block_size
        each = sum(block_bytes(model, block_size=size, dtype=self.dtype) for model in self._models)
        return KVShape(block_size=size, block_bytes=each)

    @property
    def _models(self) -> list[ModelSpec]:
        return [self.spec] if self.draft is None else [self.spec, self.draft]

    def _weights(self) -> int:
        """Return the bytes of weights that surely come to this worker: experts only where it has them all."""
        itemsize = self.dtype.itemsize
        whole = [self.spec] if self.settings.layout == "local" else []
        whole += [] if self.draft is None else [self.draft]
        experts = sum(expert_bytes(model, itemsize) for model in whole)
        return sum(dense_bytes(model, itemsize) for model in self._models) + experts


def announce(plan: WorkerPlan, max_position: int) -> None:
    """Log the plan, and what it does not allow."""
    log.info("%s", plan.line())
    room: Capacity = plan.room
    if room.lowered:
        log.warning(
            "the KV cache (%d blocks) holds %d tokens, fewer than the model's context of %d: longer requests will be "
            "rejected; raise --kv-memory-gib or --gpu-memory-utilization, or set --max-model-len",
            room.kv_blocks,
            room.kv_tokens,
            max_position,
        )
