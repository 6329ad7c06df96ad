"""How large the tiles of :mod:`moe_kernels.paged_attention.op` are, and how many programs share its work. Pure policy:
no torch, no triton.

A line of a tile is one query head of one row: the query heads of a key head lie in one tile, so that its keys are read
once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from moe_kernels.arguments import check_count, require

LEAST_LINES: Final = 16
"""Of a tile: what tensor cores multiply at least."""
_TILE_BYTES: Final = 16_384
"""Of keys, and as many of values."""
_UNIFORM_LINES: Final = 64
"""Of tiles for all rows, unless the heads of a row are more: taller ones need more registers than there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Sizes for one shape of heads on one kind of GPU; blocks are powers of two.

    ``narrow`` lines are for the few rows of a sequence that decodes, ``wide`` ones for prompts; 0: the kernel has no
    wide tiles. A tile goes through keys and values by ``length`` positions. ``wide_cost``: the time of a wide tile for
    a position over a narrow one's.
    """

    kv_heads: int
    group: int
    head_dim: int
    narrow: int
    wide: int
    length: int
    num_warps: int
    num_stages: int
    programs: int
    wide_cost: float = 2.0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def narrow_rows(self) -> int:
        """Rows of a sequence that fit a narrow tile."""
        return self.narrow // self.group

    @property
    def wide_rows(self) -> int:
        return self.wide // self.group

    def uniform(self) -> Tiling:
        """One kind of tile for decodes and prompts: what a row meets does not depend on how many come with it.

        Example: narrow tiles of 16 lines and wide ones of 64: of 64 lines, all; of 128 and 256: of 128.
        """
        return replace(self, narrow=self.wide if self.wide <= _UNIFORM_LINES else self.narrow, wide=0)


def tiling_for(
    *, heads: int, kv_heads: int, head_dim: int, itemsize: int, multiprocessors: int, warpgroups: bool = True,
    prompts: bool = True,
) -> Tiling:  # fmt: skip
    """Sizes that fit the registers and the shared memory of an A100 or a newer one.

    Args:
        heads: query heads.
        itemsize: bytes of an element of the queries.
        multiprocessors: of the GPU.
        warpgroups: whether four warps multiply together, with operands in shared memory: from Hopper on. Before,
            tiles are smaller.
        prompts: False: only narrow tiles, which leave room for more programs. For steps that decode alone; prompts
            come out right, but slowly.

    Raises:
        ArgumentError: heads that do not divide into key heads, or of more than 256.

    Example: 32 query heads, 4 key heads of 128 in bfloat16: narrow tiles of 2 rows, wide ones of 8, 64 positions.
    """
    for name, value in (("kv_heads", kv_heads), ("heads", heads), ("multiprocessors", multiprocessors)):
        check_count(name, value, 1)
    check_count("head_dim", head_dim, 1, 256)
    require(heads % kv_heads == 0, f"{heads} query heads do not divide into {kv_heads} key heads")
    require(itemsize in (2, 4), f"itemsize must be 2 or 4, found {itemsize!r}")
    group, block_h = heads // kv_heads, power_of_two(max(16, head_dim))
    narrow = power_of_two(max(LEAST_LINES, group))
    wide = max(2 * narrow, _wide_lines(itemsize)) if prompts else 0
    num_warps = _warps(narrow, wide, block_h, itemsize, warpgroups)
    few = itemsize == 4 or num_warps > 4  # registers, or shared memory, are one program's
    return Tiling(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        narrow=narrow,
        wide=wide,
        length=_positions(block_h, itemsize, warpgroups),
        num_warps=num_warps,
        num_stages=3,
        programs=multiprocessors * (3 if not prompts else 1 if few else 2),
    )


def power_of_two(least: int) -> int:
    """
    >>> power_of_two(16), power_of_two(17)
    (16, 32)
    """
    return 1 << (least - 1).bit_length()


def _positions(block_h: int, itemsize: int, warpgroups: bool) -> int:
    """Before Hopper more of what is multiplied lies in registers."""
    tile_bytes = _TILE_BYTES // (2 if itemsize == 4 and not warpgroups else 1)
    return min(128 if warpgroups else 64, max(16, tile_bytes // (block_h * itemsize)))


def _warps(narrow: int, wide: int, block_h: int, itemsize: int, warpgroups: bool) -> int:
    """Those with which the compiler needs no more registers than there are."""
    if itemsize == 4:
        return 8 if narrow >= 64 or (warpgroups and (wide or block_h >= 128)) else 4
    narrow_enough = max(narrow, wide) <= 64 and block_h <= 128 and warpgroups
    return 8 if narrow >= 64 or (wide and not narrow_enough) else 4


def _wide_lines(itemsize: int) -> int:
    """float32 is multiplied without tensor cores, out of registers. Wider tiles of two bytes read prompts a tenth
    faster, but leave room for one program only, which reads decodes half as fast."""
    return 32 if itemsize == 4 else 64
