"""What an attention worker has decided at its start, and keeps to its end: memory, KV cache, batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.attention.setup.batch_size import BatchSize, seqs_within
from services.attention.setup.capacity import Capacity, capacity
from services.attention.setup.memory_plan import (
    MIN_KV_TOKENS,
    Demand,
    GpuMemory,
    KVShape,
    Share,
    gib,
    kv_blocks,
)
from services.model.state_room import FIRST_SLOT, STATES_PER_SEQUENCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the settings say of lengths and sequences. None: the worker decides."""

    max_model_len: int | None
    max_num_seqs: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A GPU with the weights of this worker on it: its memory, what of it this worker may use, what steps need."""

    memory: GpuMemory
    share: Share
    demand: Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """``measured`` is None where the settings give the size of the KV cache, and on CPUs. ``state_bytes``: recurrent
    states, beside the KV cache."""

    room: Capacity
    size: BatchSize
    kv_bytes: int
    measured: Measured | None = None
    state_bytes: int = 0

    def line(self) -> str:
        """Return the plan in a line, for the log."""
        room, size = self.room, self.size
        parts = [
            f"KV cache {gib(self.kv_bytes)} GiB = {room.kv_blocks:,} blocks = {room.kv_tokens:,} tokens",
            f"{size.max_num_seqs:,} sequences and {size.max_num_batched_tokens:,} tokens in a step",
            f"contexts of up to {room.max_model_len:,} tokens",
        ]
        if self.state_bytes:
            each = self.state_bytes // _states(size)
            parts.insert(1, f"recurrent states {gib(self.state_bytes)} GiB, {each / 1e6:.3g} MB each")
        if self.measured is not None:
            parts.insert(0, self._gpu(self.measured))
        return "memory plan: " + "; ".join(parts)

    def _gpu(self, found: Measured) -> str:
        memory, demand = found.memory, found.demand
        planned = memory.own + demand.total + self.kv_bytes  # states are in the demand
        return (
            f"{gib(planned)} of the GPU's {gib(memory.total)} GiB (--gpu-memory-utilization "
            f"{found.share.utilization:g}{_divided(found.share)}): weights {gib(memory.allocated)}, CUDA context "
            f"{gib(memory.own - memory.allocated)}, activations {gib(demand.activations)}, CUDA graphs "
            f"{gib(demand.graphs)}, exchange {gib(demand.exchange)} GiB"
        )


def fitting(size: BatchSize, asked: Asked, measured: Measured, shape: KVShape, max_position: int) -> WorkerPlan:
    """Return the plan of a worker whose KV cache takes the rest of its share.

    Args:
        size: the batch by settings and device; its sequences become fewer where the KV cache is small.
        max_position: longest context of the model.

    Raises:
        OutOfMemory: the rest is too small; the error says what to change.
        ConfigError: the length that was asked for exceeds the model's.
    """
    least = min(asked.max_model_len or MIN_KV_TOKENS, max_position)
    blocks = kv_blocks(
        measured.memory,
        measured.share,
        measured.demand,
        shape,
        least_tokens=least,
        step=size.max_num_batched_tokens,
    )
    room = capacity(
        kv_blocks=blocks,
        block_size=shape.block_size,
        block_bytes=shape.block_bytes,
        asked=asked.max_model_len,
        max_position=max_position,
    )
    planned = crowd(size, asked, room)
    return WorkerPlan(
        room=room,
        size=planned,
        kv_bytes=blocks * shape.block_bytes,
        measured=measured,
        state_bytes=measured.demand.states * _states(planned) // _states(size),
    )


def _states(size: BatchSize) -> int:
    """Return how many recurrent states there are with such steps, where a model has some."""
    return STATES_PER_SEQUENCE * size.max_num_seqs + FIRST_SLOT


def crowd(size: BatchSize, asked: Asked, room: Capacity) -> BatchSize:
    """Return ``size`` with fewer sequences where the KV cache is small and nobody asked for more."""
    if asked.max_num_seqs is not None:
        return size
    return replace(size, max_num_seqs=seqs_within(room.kv_tokens, size.max_num_seqs))


def _divided(share: Share) -> str:
    """Return what else uses the GPU, by the settings."""
    others = [f" by {share.workers} workers"] if share.workers > 1 else []
    others += [f" without {gib(share.reserved)} GiB of expert workers"] if share.reserved else []
    return "".join(others)
