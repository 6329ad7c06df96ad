"""Tiles that were tuned for one call, made to fit another: fewer stages or narrower blocks, never more. Pure policy.

A nearest entry is of another shape, and a plan may come with larger row tiles than the entry's. What such a product
would need in shared memory or registers may then be more than there is, which the GPU answers with an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HOPPER_BYTES: Final = 227 * 1024
"""Shared memory that one program may use on an H100 or H200."""
ACCUMULATORS: Final = 128
"""float32 sums per thread; twice as many leave no registers for anything else."""
MIN_N: Final = 32
MIN_K: Final = 32
MIN_STAGES: Final = 2
BARRIER_BYTES: Final = 1024
"""Kept free for barriers and alignment of the buffers."""


def shared_bytes(tiles: Mapping[str, int], *, block_m: int, matrices: int, weight_bytes: float, row_bytes: int) -> int:
    """What the pipeline of a product holds: per stage a block of rows and one of weights, two if gated.

    Example: 128 x 128 x 64, 3 stages, gated, bf16: 3 x (2 x 16 KB + 16 KB) = 144 KB.
    """
    a_stage = tiles["BLOCK_K"] * (matrices * tiles["BLOCK_N"] * weight_bytes + block_m * row_bytes)
    return int(tiles["num_stages"] * a_stage)


def fitted(
    tiles: Mapping[str, int],
    *,
    block_m: int,
    matrices: int,
    weight_bytes: float,
    row_bytes: int,
    limit: int,
    least_k: int = MIN_K,
) -> Mapping[str, int]:
    """``tiles`` themselves where they fit, else with narrower BLOCK_N, fewer stages, a shorter BLOCK_K.

    Args:
        block_m: rows of a tile, the plan's.
        matrices: 2 for gated experts, whose gate and up rows are multiplied together; else 1.
        weight_bytes: of one weight as it is stored, e.g. 0.5 for int4.
        row_bytes: of one element of a row.
        limit: bytes of shared memory that a program may have.
        least_k: BLOCK_K is not made shorter than this.

    Example: 128 x 256 x 64, 4 stages, 8 warps, tuned for plain experts, asked for gated ones: 128 x (128 + 128).
    """

    def too_many_sums(found: Mapping[str, int]) -> bool:
        return block_m * found["BLOCK_N"] * matrices > ACCUMULATORS * 32 * found["num_warps"]

    def too_many_bytes(found: Mapping[str, int]) -> bool:
        sizes = shared_bytes(found, block_m=block_m, matrices=matrices, weight_bytes=weight_bytes, row_bytes=row_bytes)
        return sizes + BARRIER_BYTES > limit

    if not too_many_sums(tiles) and not too_many_bytes(tiles):
        return tiles
    found = dict(tiles)
    while too_many_sums(found) and found["BLOCK_N"] > MIN_N:
        found["BLOCK_N"] //= 2
    for name, least in (("num_stages", MIN_STAGES), ("BLOCK_N", MIN_N), ("BLOCK_K", least_k)):
        while too_many_bytes(found) and found[name] > least:
            # Blocks are powers of two.
            found[name] = found[name] - 1 if name == "num_stages" else found[name] // 2
    return found
