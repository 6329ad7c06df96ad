"""Divides the memory of a GPU: weights, activations, CUDA graphs, exchange, and the KV cache with the rest. Pure.

In: numbers that a worker has measured. Out: the KV blocks, or an error that says which setting to change, and to what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.errors import OutOfMemory

GIB = 1 << 30
CONTEXT_BYTES = GIB
"""Memory outside of torch's allocator that a worker counts as its own: the CUDA context, kernels, NCCL. What is used
beyond it belongs to other processes, whose memory is no part of this worker's share."""
SPARE_BYTES = GIB // 2
"""Memory that stays free although the share would allow its use: libraries allocate at their first call."""
GRAPHS_BYTES = GIB // 2
"""Memory of all CUDA graphs of a model besides their pool: nodes and their arguments."""
MIN_KV_TOKENS = 2048
"""A smaller KV cache serves nobody: the worker does not start, unless the model's context is shorter, too."""
MAX_UTILIZATION = 0.98
"""No higher value of --gpu-memory-utilization is advised."""
MIN_STEP_TOKENS = 256
"""No lower value of --max-num-batched-tokens is advised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """A GPU's memory, in bytes. ``allocated``: what torch holds in this process, weights at first."""

    total: int
    free: int
    allocated: int

    @property
    def outside(self) -> int:
        """Bytes that torch did not allocate in this process: its CUDA context, and all of other processes."""
        return max(0, self.total - self.free - self.allocated)

    @property
    def own(self) -> int:
        """Bytes that count as this process's own."""
        return self.allocated + min(self.outside, CONTEXT_BYTES)

    @property
    def others(self) -> int:
        """Bytes that other processes use."""
        return max(0, self.outside - CONTEXT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What of a GPU a worker may use.

    ``utilization`` of its memory, without the ``reserved`` bytes of expert workers, in equal parts for ``workers``
    attention workers.
    """

    utilization: float
    workers: int = 1
    reserved: int = 0

    def of(self, total: int) -> int:
        """Return this worker's bytes."""
        return int(total * self.utilization - self.reserved) // self.workers

    def utilization_for(self, own: int, total: int) -> float:
        """Return the utilization with which this worker's share is ``own`` bytes, rounded up to whole percents.

        >>> Share(utilization=0.5, workers=2, reserved=10).utilization_for(31, 100)
        0.72
        """
        return math.ceil(round(100 * (own * self.workers + self.reserved) / total, 6)) / 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Bytes that steps need besides weights and KV cache. ``states``: recurrent states."""

    activations: int = 0
    graphs: int = 0
    exchange: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.graphs + self.exchange + self.states


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Size of a KV block, in tokens and in bytes."""

    block_size: int
    block_bytes: int

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def graphs_demand(activations: int, *, captured: bool, models: int = 1) -> int:
    """Return the bytes of CUDA graphs of so many models, if there are any. They share one pool, which may have to be as
    large as the activations of the largest step, and which steps that run without a graph do not use."""
    return activations + models * GRAPHS_BYTES if captured else 0


def exchange_demand(rows: int, *, hidden: int, slots: int, itemsize: int, peers: int) -> int:
    """Return the bytes in which two micro-batches of ``rows`` rows travel between this worker and ``peers`` others:
    rows and answers of ``hidden`` numbers, an id and a weight for each of ``slots`` experts."""
    return 2 * peers * rows * (2 * hidden * itemsize + 8 * slots)


def experts_demand(rows: int, *, hidden: int, width: int, slots: int, itemsize: int) -> int:
    """Return the bytes that experts of ``width`` need to compute ``rows`` rows, each by ``slots`` of them: both inner
    products, their activation, and the output of each."""
    return rows * slots * (3 * width + hidden) * itemsize


def kv_blocks(memory: GpuMemory, share: Share, demand: Demand, shape: KVShape, *, least_tokens: int, step: int) -> int:
    """Return how many KV blocks fit, once the weights are loaded.

    Args:
        least_tokens: the KV cache must hold as many.
        step: most tokens of a step, for the hint.

    Raises:
        OutOfMemory: too few do.
    """
    blocks = max(0, _room(memory, share, demand)) // shape.block_bytes
    least = shape.blocks_for(least_tokens)
    if blocks >= least:
        return blocks
    raise OutOfMemory(
        f"The KV cache would hold {blocks * shape.block_size:,} tokens, and {least_tokens:,} are needed: of "
        f"{gib(memory.total)} GiB, weights and the rest of this worker take {gib(memory.own)}, activations "
        f"{gib(demand.activations)}, CUDA graphs {gib(demand.graphs)}, the exchange {gib(demand.exchange)}, other "
        f"processes {gib(max(memory.others, share.reserved))} GiB.",
        hint=_way_out(memory, share, demand, least * shape.block_bytes, step),
    )


def left_to_cache(memory: GpuMemory, share: Share) -> int:
    """Return the bytes that are left besides weights: for steps, states and the KV cache."""
    return max(0, _room(memory, share, Demand()))


def check_weights(memory: GpuMemory, share: Share, weights: int) -> None:
    """Refuse weights for which there is no room, before they are read.

    Raises:
        OutOfMemory: there is none.
    """
    if weights <= _room(memory, share, Demand()):
        return
    raise OutOfMemory(
        f"The weights of this worker take {gib(weights)} GiB, and {gib(max(0, _room(memory, share, Demand())))} of "
        f"the GPU's {gib(memory.total)} GiB can be used.",
        hint=_way_out(memory, share, Demand(), weights, 0),
    )


def gib(size: int) -> str:
    """Return ``size`` bytes in GiB, with one decimal.

    >>> gib(3 << 29)
    '1.5'
    """
    return f"{size / GIB:.1f}"


def _room(memory: GpuMemory, share: Share, demand: Demand) -> int:
    """Return the bytes that are left of the share, or of what is free if that is less."""
    return min(share.of(memory.total) - memory.own, memory.free - SPARE_BYTES) - demand.total


def _way_out(memory: GpuMemory, share: Share, demand: Demand, wanted: int, step: int) -> str:
    """Return what to change so that ``wanted`` bytes fit beside ``demand``. ``step``: most tokens of a step."""
    needed = demand.total + wanted
    if needed <= memory.free - SPARE_BYTES:
        utilization = share.utilization_for(memory.own + needed, memory.total)
        if utilization <= MAX_UTILIZATION:
            return f"Give --gpu-memory-utilization {utilization:g}, which is {share.utilization:g} now."
    if memory.others and needed <= memory.free - SPARE_BYTES + memory.others:
        return (
            f"Other processes hold {gib(memory.others)} GiB of this GPU: end them, choose another with --device, or "
            "give each --gpu-memory-utilization less, so that all add up to 0.95."
        )
    return _smaller_step(memory, share, demand, wanted, step) or (
        "Use a GPU with more memory, or several: --layout colocated --workers N spreads the experts over N GPUs "
        "(docs/layouts.md)."
    )


def _smaller_step(memory: GpuMemory, share: Share, demand: Demand, wanted: int, step: int) -> str | None:
    """Return the hint to lower the tokens of a step, where that frees enough."""
    left = _room(memory, share, Demand()) - wanted
    tokens = MIN_STEP_TOKENS
    if left <= 0 or step <= tokens or demand.total * tokens > left * step:
        return None
    while 2 * tokens < step and demand.total * 2 * tokens <= left * step:
        tokens *= 2
    return f"Give --max-num-batched-tokens {tokens}, which is {step} now."
