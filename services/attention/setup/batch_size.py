"""How many sequences and tokens a step may have where the settings do not say, by the memory of the GPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
PROMPT_SHARE = 8
"""One part in this many of a step is left to prompts by default, however many sequences decode."""
KV_TOKENS_PER_SEQUENCE = 256
"""With less KV cache than this per sequence, more sequences would mostly be put out and computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """Most sequences in the batch, and most tokens in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


WITHOUT_GPU = BatchSize(max_num_seqs=64, max_num_batched_tokens=512)
GPUS = (
    (64 * GIB, BatchSize(max_num_seqs=512, max_num_batched_tokens=8192)),
    (30 * GIB, BatchSize(max_num_seqs=256, max_num_batched_tokens=4096)),
    (0, BatchSize(max_num_seqs=128, max_num_batched_tokens=2048)),
)
"""The defaults of GPUs with at least so many bytes of memory, the largest first."""


def batch_size(*, seqs: int | None, tokens: int | None, gpu_bytes: int | None) -> BatchSize:
    """Return the batch of a worker. ``seqs`` and ``tokens`` are the settings, which win.

    Args:
        gpu_bytes: memory of its GPU; None: it computes on a CPU.
    """
    if gpu_bytes is None:
        seqs = WITHOUT_GPU.max_num_seqs if seqs is None else seqs
        tokens = WITHOUT_GPU.max_num_batched_tokens if tokens is None else tokens
        return BatchSize(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    usual = next(size for least, size in GPUS if gpu_bytes >= least)
    if tokens is None:
        tokens = usual.max_num_batched_tokens
    if seqs is None:
        seqs = max(1, min(usual.max_num_seqs, tokens - tokens // PROMPT_SHARE))
    return BatchSize(max_num_seqs=seqs, max_num_batched_tokens=tokens)


def seqs_within(kv_tokens: int, usual: int) -> int:
    """Return ``usual``, or as many sequences as a KV cache of ``kv_tokens`` is good for, if that is more than without a
    GPU.

    >>> seqs_within(1_000_000, 512), seqs_within(32_768, 512), seqs_within(16, 512), seqs_within(16, 7)
    (512, 128, 64, 7)
    """
    return min(usual, max(WITHOUT_GPU.max_num_seqs, kv_tokens // KV_TOKENS_PER_SEQUENCE))
