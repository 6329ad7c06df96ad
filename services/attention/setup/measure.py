"""Measures what the largest steps need of a GPU's memory, before the KV cache takes the rest.

A throwaway engine serves dummy requests: prompts that fill a step, up to a long past, then as many sequences as a batch
may have, with every kind of sampling. Where the experts are in other processes a stand-in takes their place.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from services.attention.sequences.plan import BatchLimits
from services.attention.setup.batch_size import BatchSize
from services.attention.setup.memory_plan import GpuMemory
from services.attention.step.engine import Engine, EngineOptions
from services.attention.step.warmup import DRAWN, dummy_batches
from services.errors import OutOfMemory
from services.fabric.link import ExpertLink, SynchronousLink
from services.messages import GenerateRequest
from services.model.dense import DenseModel

LONG_TOKENS = 32_768
CHUNKS = 8
"""Prompts are as long as the context, but at most :data:`LONG_TOKENS`, and at most this many steps."""

log = logging.getLogger(__name__)


class NoExperts(SynchronousLink):
    """Takes the place of experts elsewhere: each row comes back as it is."""

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        del layer, expert_ids_TK, weights_TK
        return x_TD

    def combine(self, handle: Tensor) -> Tensor:
        return torch.zeros_like(handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """How many prompts of how many tokens fill the largest step."""

    count: int
    length: int

    @classmethod
    def filling(cls, step: int, max_model_len: int) -> Prompts:
        """Return prompts that fill a step of ``step`` tokens, long ones if the context allows them.

        >>> Prompts.filling(512, 40_960), Prompts.filling(8192, 40_960), Prompts.filling(8192, 4096)
        (Prompts(count=1, length=4096), Prompts(count=1, length=32768), Prompts(count=3, length=4093))
        """
        length = max(1, min(max_model_len - DRAWN, LONG_TOKENS, CHUNKS * step))
        return cls(count=-(-step // length), length=length)


def gpu_memory(device: torch.device) -> GpuMemory:
    """Return how the memory of ``device`` is used now. What torch keeps for later allocations is given back first."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, allocated=torch.cuda.memory_reserved(device))


def activations(
    model: DenseModel, link: ExpertLink[Any] | None, *, size: BatchSize, max_model_len: int, block_size: int
) -> int:
    """Return the bytes that the largest steps need for a time, and free again. Takes seconds.

    Args:
        link: reaches experts in this process; None: they are elsewhere.

    Raises:
        OutOfMemory: the GPU has too little.
    """
    device = model.device
    prompts = Prompts.filling(size.max_num_batched_tokens, max_model_len)
    tokens = max(prompts.count * (prompts.length + DRAWN), 4 * block_size * size.max_num_seqs)
    options = EngineOptions(
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_blocks=-(-tokens // block_size) + prompts.count,
        block_size=block_size,
        prefix_cache=False,
    )
    try:
        engine: Engine[Any] = Engine(model=model, link=link or NoExperts(), options=options, clock=lambda: 0)
    except OutOfMemory as error:
        raise _too_large(size, device) from error
    before, failed = torch.cuda.memory_allocated(device), _failures(device)
    torch.cuda.reset_peak_memory_stats(device)
    for requests in _batches(model, prompts, size, max_model_len, tokens):
        _serve(engine, requests)
    if _failures(device) > failed:
        raise _too_large(size, device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del engine
    gc.collect()  # its KV cache must be gone before the memory is read again
    return peak


def _too_large(size: BatchSize, device: torch.device) -> OutOfMemory:
    return OutOfMemory(
        f"A step of {size.max_num_batched_tokens} tokens with {size.max_num_seqs} sequences does not fit into the "
        f"memory that the weights leave of {device}.",
        hint=f"Give --max-num-batched-tokens {max(1, size.max_num_batched_tokens // 2)}, or lower --max-num-seqs.",
    )


def _batches(
    model: DenseModel, prompts: Prompts, size: BatchSize, max_model_len: int, kv_tokens: int
) -> list[list[GenerateRequest]]:
    limits = BatchLimits(
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=(),
    )
    long = next(dummy_batches(replace(limits, max_num_batched_tokens=prompts.length), kv_tokens), [])
    crowd = list(dummy_batches(limits, kv_tokens))[-1:]
    return [[structs.replace(one, id=f"{one.id}-{at}") for one in long for at in range(prompts.count)], *crowd]


def _serve(engine: Engine[Any], requests: Sequence[GenerateRequest]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if event.error:
                log.warning("measuring activations: %s", event.error.message)


def _failures(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))
