"""Kernel of :mod:`moe_kernels.counts.op`. Legend: S pairs, E experts."""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.overlap import overlaps

PAIRS_PER_PROGRAM = 1024


@triton.jit
def count_pairs_kernel(counts_E, ids_S, S, E: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """One program counts BLOCK pairs by itself, and adds what it found to each expert's count at once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_S + at, mask=at < S, other=-1)
    bins = tl.arange(0, BINS)
    # Bin E takes what no expert does.
    here = (ids >= 0) & (ids < E)
    found = tl.histogram(tl.where(here, ids, E).to(tl.int32), BINS)
    tl.atomic_add(counts_E + bins, found.to(tl.int64), mask=(bins < E) & (found > 0), sem="relaxed")


def launch(counts_E: Tensor, ids_TK: Tensor) -> None:
    pairs, experts = ids_TK.numel(), counts_E.numel()
    block = min(PAIRS_PER_PROGRAM, max(32, triton.next_power_of_2(pairs)))
    pdl = overlaps(ids_TK.device)
    count_pairs_kernel[(triton.cdiv(pairs, block),)](
        counts_E, ids_TK, pairs, E=experts, BINS=triton.next_power_of_2(experts + 1), PDL=pdl, BLOCK=block,
        launch_pdl=pdl,
    )  # fmt: skip
