"""The ways through fused_moe: its reference in plain torch and its four kernels, on tensors of any device.

Tiles are so small that most layers in tests have several of them, the last one cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from moe_kernels import backend, tiles

ALL = 1 << 20
MAX_ROWS: Mapping[str, Mapping[str, int]] = {
    "torch": {},
    "gemv": {"GEMV_ROWS": ALL, "SMALL_ROWS": ALL},
    "small": {"GEMV_ROWS": 0, "SMALL_ROWS": ALL},
    "large": {"GEMV_ROWS": 0, "SMALL_ROWS": 0},
    "swapped": {"GEMV_ROWS": 0, "SMALL_ROWS": 0},
}
SWAPPED: Mapping[str, Mapping[str, int]] = {"large.in": {"SWAP": 1, "TMA": 1}, "large.down": {"SWAP": 1, "TMA": 0}}
REGIMES = [*MAX_ROWS]
REGIMES_AND_ROWS = [
    ("torch", 1),
    ("torch", 33),
    ("gemv", 1),
    ("gemv", 3),
    ("small", 2),
    ("small", 18),
    ("large", 1),
    ("large", 33),
    ("swapped", 17),
]
SMALL_TILES: Mapping[str, Mapping[str, int]] = {
    "gemv": {"BLOCK_N": 16, "BLOCK_K": 16, "DOWN_BLOCK_N": 16, "DOWN_BLOCK_K": 16},
    "small.in": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16},
    "small.down": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "SPLIT_K": 2},
    "large.in": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "PERSIST": 0},
    "large.down": {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "PERSIST": 1},
}


LARGER_TILES: Mapping[str, Mapping[str, int]] = {
    "gemv": {"BLOCK_N": 64, "BLOCK_K": 128, "DOWN_BLOCK_N": 64, "DOWN_BLOCK_K": 128},
    "small.in": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128},
    "small.down": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "SPLIT_K": 1},
    "large.in": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 2, "PERSIST": 0},
    "large.down": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 2, "PERSIST": 0},
}
"""For quantised matrices, whose sides are 128 at least."""


@contextmanager
def larger_tiles() -> Iterator[None]:
    """Inside a regime."""
    with tiles.overridden(_complete(LARGER_TILES)):
        yield


def _complete(sizes: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Arguments that are not about sizes are those of the table."""
    return {op: {**tiles.tiles(op, shape={}, rows=1, dtype="fp32"), **chosen} for op, chosen in sizes.items()}


@contextmanager
def regime(name: str) -> Iterator[None]:
    path: backend.Path = "torch" if name == "torch" else "triton"
    chosen = _complete(SMALL_TILES)
    if name == "swapped":
        chosen |= {op: {**chosen[op], **flags} for op, flags in SWAPPED.items()}
    with backend.forced(path), tiles.overridden({**chosen, "fused_moe": MAX_ROWS[name]}):
        yield
