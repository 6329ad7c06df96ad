"""Capacity of a worker: KV blocks, the longest sequence, and the credit that it gives the scheduler. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.errors import ConfigError

USUAL_KV_GIB = 1.0
"""GiB of the KV cache on CPUs, unless the settings say otherwise."""
OVERCOMMIT = 1.5
"""Tokens that a worker is assigned, as a multiple of those that its KV blocks hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Lengths in tokens, prompt plus answer. ``lowered``: the model's own length does not fit the KV blocks."""

    kv_blocks: int
    kv_tokens: int
    max_model_len: int
    lowered: bool


def capacity(
    *,
    kv_blocks: int,
    block_size: int,
    block_bytes: int,
    asked: int | None,
    max_position: int,
    beside: Callable[[int], int] = lambda _: 0,
) -> Capacity:
    """Return the capacity of ``kv_blocks`` for a model of ``max_position`` positions; ``asked`` is --max-model-len.

    Args:
        beside: what else a KV cache of so many bytes has in its memory, in bytes.

    Raises:
        ConfigError: ``asked`` is more than the model or the KV blocks allow.
    """
    kv_tokens = kv_blocks * block_size
    if asked is not None and asked > max_position:
        raise ConfigError(
            f"--max-model-len {asked} exceeds the {max_position} positions that the checkpoint supports.",
            hint="Lower it or leave it out.",
        )
    if asked is not None and asked > kv_tokens:
        raise ConfigError(
            f"--max-model-len {asked} does not fit: {kv_blocks} KV blocks of {block_size} hold {kv_tokens} tokens.",
            hint=f"Give --kv-memory-gib {gib_for(asked, block_size, block_bytes, beside):g}, or lower --max-model-len "
            f"to at most {kv_tokens}.",
        )
    max_model_len = min(asked or max_position, kv_tokens)
    return Capacity(
        kv_blocks=kv_blocks,
        kv_tokens=kv_tokens,
        max_model_len=max_model_len,
        lowered=asked is None and max_model_len < max_position,
    )


def gib_for(tokens: int, block_size: int, block_bytes: int, beside: Callable[[int], int] = lambda _: 0) -> float:
    """Return the GiB of a KV cache for ``tokens``, rounded up so that it can be given as --kv-memory-gib.

    >>> gib_for(100, 16, 1 << 20)
    0.007
    """
    pages = -(-tokens // block_size) * block_bytes
    return math.ceil((pages + beside(pages)) / 2**30 * 1000) / 1000


def credit(*, kv_tokens: int, max_num_seqs: int) -> tuple[int, int]:
    """Return how many tokens and requests a worker may be assigned at a time.

    The tokens exceed those that the KV blocks hold, since most requests end before ``max_tokens``. The requests exceed
    the batch by a few, so that a free place in it is filled without a round trip to the scheduler.
    """
    return max(1, int(kv_tokens * OVERCOMMIT)), max_num_seqs + max(1, max_num_seqs // 8)
