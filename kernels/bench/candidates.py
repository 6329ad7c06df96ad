"""Which tiles the tuner tries, per op: the one place where search spaces are declared. Pure policy.

A search goes through :func:`stages`: first block sizes, warps and pipeline stages, then each of ``SWITCHES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from bench.floors import WEIGHT_BYTES
from bench.shapes import LayerShape
from moe_kernels import fitting

Tiles = dict[str, int]

ACTIVATION_BYTES: Final = 2
PRESETS: Final[Mapping[str, Tiles]] = {
    "gemv": {"GEMV_ROWS": 1 << 20, "SMALL_ROWS": 0},
    "small": {"GEMV_ROWS": 0, "SMALL_ROWS": 1 << 20},
    "large": {"GEMV_ROWS": 0, "SMALL_ROWS": 0},
}
"""The regime that a measurement is forced into, by the first part of the op's name: tiles of "fused_moe"."""
ROUNDED: Final = "rounded"
"""First part of the names of ops whose rows are rounded to FP8."""
ROUNDED_MIN_ROWS: Final = 8
SWITCHES: Final[Mapping[str, Tiles]] = {
    "gemv": {"PDL": 1},
    "small.in": {"TMA": 1, "EVICT_FIRST": 1, "PDL": 1, "LISTS_LAUNCH": 1, "MAX_REGISTERS": 128},
    "small.down": {"TMA": 1, "EVICT_FIRST": 1, "PDL": 1, "COMBINE_LAUNCH": 1, "PARTS_FP32": 1, "MAX_REGISTERS": 128},
    "large.in": {"PDL": 1, "EVICT_FIRST": 1, "MAX_REGISTERS": 128},
    "large.down": {"PDL": 1, "EVICT_FIRST": 1, "MAX_REGISTERS": 128},
}
"""Flags to throw on the winner, one after another: to this value, or to 0 if they have it."""
SMALL_MAX_PAIRS: Final = 2048
"""The small regime holds all pairs of a call in registers."""
GEMV_MAX_ROWS: Final = 16
LARGE_MIN_ROWS: Final = 32
SWAP_MAX_ROWS: Final = 1024
"""Beyond, 16-bit products are bound by arithmetic, and rows fill the matrix unit as they are."""


def regimes(shape: LayerShape, rows: int, dtype: str = "bf16") -> list[str]:
    """Those worth measuring. Example, 8 slots: 1 row gemv and small, 128 rows small and large, 512 rows large."""
    limits = {
        "gemv": rows <= GEMV_MAX_ROWS,
        "small": rows * shape.k <= SMALL_MAX_PAIRS,
        "large": rows >= LARGE_MIN_ROWS,
        ROUNDED: rows >= ROUNDED_MIN_ROWS and dtype == "fp8",
    }
    return [name for name, inside in limits.items() if inside]


def forced(op: str) -> dict[str, Tiles]:
    """Tiles of other ops with which a call takes the way that ``op`` is on."""
    kind = op.partition(".")[0]
    preset = {"fused_moe": PRESETS[kind]} if kind in PRESETS else {}
    return {**preset, "rounded_rows": {"FROM_ROWS": int(kind == ROUNDED)}}


def stages(op: str, shape: LayerShape, rows: int, dtype: str) -> list[list[Tiles]]:
    """Sets of changes. The best of a stage is what the next one's changes are applied to."""
    kind, _, part = op.partition(".")
    if kind == "gemv":
        found = [_gemv(shape, dtype, down=False), _cross(maxnreg=(0, 64, 96, 128))]
        found += [_gemv(shape, dtype, down=True), _cross(DOWN_maxnreg=(0, 64, 96, 128))]
    elif kind == "small":
        found = [_small(shape, rows, dtype, down=part == "down")]
    elif kind == "large":
        found = [_large(shape, rows, dtype, down=part == "down"), _cross(GROUP_M=(2, 4, 8, 16, 32))]
    elif kind == ROUNDED:
        found = [_rounded(shape, rows, down=part == "down"), _cross(GROUP_M=(2, 4, 8, 16, 32))]
    else:
        found = [_cross(BLOCK_D=(256, 512, 1024, 2048), num_warps=(1, 2, 4, 8))]
    return [list(stage) for stage in found] + [[{name: value}] for name, value in SWITCHES.get(op, {}).items()]


def variants(op: str, best: Mapping[str, int], changes: Sequence[Tiles], shape: LayerShape, dtype: str) -> list[Tiles]:
    """``best`` with each change, or with a switch thrown, that fits shared memory and differs from it."""
    changed = [{**best, **_thrown(op, best, change)} for change in changes]
    unique = {tuple(sorted(tiles.items())): tiles for tiles in changed if tiles != best}
    return [tiles for tiles in unique.values() if shared_bytes(op, tiles, shape, dtype) <= fitting.HOPPER_BYTES]


def _thrown(op: str, best: Mapping[str, int], change: Tiles) -> Tiles:
    """Example: PDL is on and the change is the switch PDL: off."""
    (name, value), *more = change.items()
    is_switch = not more and SWITCHES.get(op, {}).get(name) == value
    return {name: 0} if is_switch and best[name] == value else change


def shared_bytes(op: str, tiles: Mapping[str, int], shape: LayerShape, dtype: str) -> float:
    """A pipelined product holds ``num_stages`` blocks of weights (two if gated) and of rows; 0 for other kernels.

    Example: large.in, swiglu, 128 x 128 x 64, 3 stages, bf16: 3 x (2 x 16 KB + 16 KB) = 144 KB.
    """
    if not {"BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"} <= tiles.keys():
        return 0.0
    return fitting.shared_bytes(
        tiles, block_m=tiles["BLOCK_M"], matrices=2 if shape.gated and op.endswith(".in") else 1,
        weight_bytes=WEIGHT_BYTES[dtype], row_bytes=1 if op.startswith(ROUNDED) else ACTIVATION_BYTES,
    )  # fmt: skip


def _gemv(shape: LayerShape, dtype: str, *, down: bool) -> Iterator[Tiles]:
    """Each thread takes whole chunks of 16 bytes along a row, 2 to 16 of them at a time over all parts.

    Parts: gate and up in the first launch, the slots of a token (padded to a power of two) in the second.
    """
    prefix, parts = ("DOWN_", 1 << (shape.k - 1).bit_length()) if down else ("", 2 if shape.gated else 1)
    per_chunk = int(16 / WEIGHT_BYTES[dtype])
    stages = (1, 2) if WEIGHT_BYTES[dtype] < 2 else (1, 2, 4)
    for change in _cross(num_warps=(1, 2, 4), BLOCK_N=(1, 2, 4, 8), num_stages=stages):
        for chunks in (1, 2):
            if 2 <= change["BLOCK_N"] * parts * chunks <= 16:
                block_k = 32 * change["num_warps"] * per_chunk * chunks
                yield {f"{prefix}{name}": value for name, value in {**change, "BLOCK_K": block_k}.items()}


def _small(shape: LayerShape, rows: int, dtype: str, *, down: bool) -> Iterator[Tiles]:
    """Tokens of an expert fill BLOCK_M; int4 reads whole runs of 128 columns."""
    blocks_k = (128, 256) if WEIGHT_BYTES[dtype] == 0.5 else (64, 128, 256)
    splits = {"SPLIT_K": (1, 2, 4)} if down else {}
    yield from _cross(
        BLOCK_M=_row_blocks(shape, rows, 64), BLOCK_N=(64, 128), BLOCK_K=blocks_k, num_warps=(4, 8),
        num_stages=(3, 4, 6), **splits,
    )  # fmt: skip


def _large(shape: LayerShape, rows: int, dtype: str, *, down: bool) -> Iterator[Tiles]:
    """Integer weights need the swapped product, which dequantises in registers; few rows may take it.

    The rows of a tile are the plan's, which takes them from "large.in".
    """
    most = 128 if WEIGHT_BYTES[dtype] < 2 else 64
    swap = WEIGHT_BYTES[dtype] < 2 or rows <= SWAP_MAX_ROWS
    blocks_m = {} if down else {"BLOCK_M": _row_blocks(shape, rows, most)[-3:]}
    if swap:
        yield from _cross(
            SWAP=(1,), TMA=(1,), BLOCK_N=(64, 128), BLOCK_K=(64, 128), num_warps=(4, 8), num_stages=(3, 4), **blocks_m
        )
    if not WEIGHT_BYTES[dtype] < 2:
        blocks_m = {} if down else {"BLOCK_M": _row_blocks(shape, rows, 128)[-3:]}
        yield from _cross(
            SWAP=(0,), BLOCK_N=(64, 128, 256), BLOCK_K=(64,), num_warps=(4, 8), num_stages=(3, 4), PERSIST=(0, 1),
            **blocks_m,
        )  # fmt: skip


def _rounded(shape: LayerShape, rows: int, *, down: bool) -> Iterator[Tiles]:
    blocks_m = {} if down else {"BLOCK_M": _row_blocks(shape, rows, 128)[-2:]}
    yield from _cross(BLOCK_N=(64, 128), num_warps=(4, 8), num_stages=(3, 4, 5), **blocks_m)


def _row_blocks(shape: LayerShape, rows: int, most: int) -> tuple[int, ...]:
    """Sizes up to four times what an expert has on average: draws are uneven."""
    enough = max(16, 4 * rows_of_expert(shape, rows))
    return tuple(size for size in (16, 32, 64, 128) if size <= min(enough, most))


def rows_of_expert(shape: LayerShape, rows: int) -> int:
    """On average, rounded up. Example: 128 rows, 8 of 128 experts: 8."""
    return -(-rows * shape.k // shape.E)


def _cross(**choices: Sequence[int]) -> Iterator[Tiles]:
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
