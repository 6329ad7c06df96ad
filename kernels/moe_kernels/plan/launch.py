"""Arguments of :func:`moe_kernels.plan.op` in, launches of :mod:`moe_kernels.plan.kernel` out.

Few pairs take one launch, more take three: count per block, scan, place. Every element is written, so nothing needs
clearing beforehand. With a capacity the sort runs twice: first over all pairs in order of
arrival, to find out which are served, then over the served ones.
Legend: S pairs, E experts, M tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
from torch import Tensor

from moe_kernels.overlap import overlaps
from moe_kernels.plan.kernel import count_kernel, place_kernel, scan_kernel, small_kernel
from moe_kernels.plan.types import FirstCome, Plan, tile_bound

SMALL_PAIRS = 4096
SMALL_COMPARISONS = 2**19
"""In one launch every expert's program reads every pair: up to so many pairs, and pairs times experts, it is faster."""
EARLY_PAIRS = 1024
"""Up to so many pairs the kernel after the one launch may start at once (why: ``router.kernel.EARLY_ROWS``)."""
TILES_PER_PROGRAM = 256
PAIRS_PER_PROGRAM = 512
"""Pairs that one program of the large sort's last step places."""
EXPERTS_PER_PROGRAM = 8
"""Experts whose counts one program of the large sort's scan adds up: 32 bytes of a row."""


def launch(
    ids_TK: Tensor,
    experts: int,
    block_rows: int,
    capacity: int | None,
    first_come: FirstCome,
    keep_T: Tensor | None,
    local_E: Tensor | None,
    *,
    pdl: bool | None = None,
    small_pairs: int | None = None,
    small: tuple[int, int] = (4096, 8),
    large: tuple[int, int] = (128, 4),
) -> Plan:
    """Arguments as :func:`moe_kernels.plan.op` checks them, at least one pair.

    Args:
        pdl: start before the kernel that writes the ids ends; by default where the device can.
        small_pairs: up to so many pairs go by one launch; by default :data:`SMALL_PAIRS` or fewer.
        small, large: pairs that a program holds at once and its warps, for the sort in one launch and in three.
    """
    pdl = overlaps(ids_TK.device) if pdl is None else pdl
    made, ids_TK = _empty_plan(ids_TK, experts, block_rows), ids_TK.contiguous()
    if small_pairs is None:
        small_pairs = min(SMALL_PAIRS, SMALL_COMPARISONS // experts)
    sort, (block, warps) = (_sort_small, small) if ids_TK.numel() <= small_pairs else (_sort_large, large)
    if capacity is None:
        sort(made, ids_TK, experts, _Pass(keep_T=keep_T, local_E=local_E), pdl=pdl, block=block, warps=warps)
        return made
    served_1, limited_S = torch.empty_like(made.dropped_1), torch.empty_like(made.order_S)
    arrivals = _Pass(
        keep_T=keep_T,
        local_E=local_E,
        served_1=served_1,
        limited_S=limited_S,
        capacity=capacity,
        slot_first=first_come == "slot",
    )
    sort(made, ids_TK, experts, arrivals, pdl=pdl, block=block, warps=warps)
    sort(made, limited_S, experts, _Pass(served_1=served_1), pdl=pdl, block=block, warps=warps)
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """What a sort needs besides the ids. With ``limited_S`` it is the first of two: it writes that and ``served_1``."""

    keep_T: Tensor | None = None
    local_E: Tensor | None = None
    served_1: Tensor | None = None
    """How many pairs have an expert here."""
    limited_S: Tensor | None = None
    """Expert of every pair, -1 if capacity dropped it."""
    capacity: int = 0
    slot_first: bool = False

    def pointers(self, spare: Tensor) -> tuple[Tensor, Tensor]:
        """``table`` and ``keep``; ``spare`` stands for one that is not read."""
        return (
            self.local_E.contiguous() if self.local_E is not None else spare,
            self.keep_T.contiguous().view(torch.uint8) if self.keep_T is not None else spare,
        )

    def flags(self) -> dict[str, bool]:
        return {
            "SLOT_FIRST": self.slot_first,
            "HAS_TABLE": self.local_E is not None,
            "HAS_KEEP": self.keep_T is not None,
        }

    def stage(self) -> dict[str, bool]:
        return {
            "LIMIT": self.limited_S is not None,
            "LIMITED": self.limited_S is None and self.served_1 is not None,
        }


def _sort_small(made: Plan, ids: Tensor, experts: int, given: _Pass, *, pdl: bool, block: int, warps: int) -> None:
    pairs, tiles = made.order_S.numel(), made.tile_expert_M.numel()
    block = min(block, max(128, triton.next_power_of_2(pairs)))
    table, keep = given.pointers(ids)
    small_kernel[(experts + 1 + _lists(tiles, given),)](
        ids, table, keep, made.order_S, made.place_S, made.ends_E, made.tile_expert_M, made.tile_row_M,
        made.tile_count_1, made.dropped_1, _or(given.served_1, ids), _or(given.limited_S, ids),
        pairs // made.slots, tiles, _known(given, experts), given.capacity,
        E=experts, X=_bins(experts), SLOTS=made.slots, BLOCK_ROWS=made.block_rows, B=block,
        ONE_BLOCK=pairs <= block, PAD=TILES_PER_PROGRAM, PDL=pdl, EARLY=pairs <= EARLY_PAIRS, num_warps=warps,
        launch_pdl=pdl, **given.flags(), **given.stage(),
    )  # fmt: skip


def _sort_large(made: Plan, ids: Tensor, experts: int, given: _Pass, *, pdl: bool, block: int, warps: int) -> None:
    pairs, tiles = made.order_S.numel(), made.tile_expert_M.numel()
    blocks, placing = triton.cdiv(pairs, block), triton.cdiv(pairs, PAIRS_PER_PROGRAM)
    common = {"E": experts, "PDL": pdl, "num_warps": warps, "launch_pdl": pdl}
    table, keep = given.pointers(ids)
    ranked_S = torch.empty_like(made.order_S)
    lower = torch.empty(blocks, experts + 2, dtype=torch.int32, device=ids.device)
    starts = torch.empty(blocks, experts + 1, dtype=torch.int32, device=ids.device)
    count_kernel[(blocks,)](
        ids, table, keep, ranked_S, lower, pairs // made.slots, _known(given, experts),
        X=_bins(experts), SLOTS=made.slots, B=block, **given.flags(), **common,
    )  # fmt: skip
    scan_kernel[(triton.cdiv(experts + 1, EXPERTS_PER_PROGRAM),)](
        lower, starts, made.ends_E, made.dropped_1, _or(given.served_1, ids), blocks,
        C=min(512, triton.next_power_of_2(blocks)),
        W=EXPERTS_PER_PROGRAM, **given.stage(), **common,
    )  # fmt: skip
    place_kernel[(placing + _lists(tiles, given),)](
        ranked_S, starts, made.ends_E, made.order_S, made.place_S, made.tile_expert_M, made.tile_row_M,
        made.tile_count_1, _or(given.limited_S, ids), pairs // made.slots, tiles, given.capacity, placing,
        X=_bins(experts), SLOTS=made.slots, BLOCK_ROWS=made.block_rows, SLOT_FIRST=given.slot_first,
        LIMIT=given.stage()["LIMIT"], B=block, N=PAIRS_PER_PROGRAM, PAD=TILES_PER_PROGRAM, **common,
    )  # fmt: skip


def _lists(tiles: int, given: _Pass) -> int:
    """Programs that list tiles: none in a first pass."""
    return 0 if given.stage()["LIMIT"] else int(triton.cdiv(tiles, TILES_PER_PROGRAM))


def _or(tensor: Tensor | None, spare: Tensor) -> Tensor:
    return spare if tensor is None else tensor


def _known(given: _Pass, experts: int) -> int:
    """Ids from this on are elsewhere."""
    return experts if given.local_E is None else len(given.local_E)


def _bins(experts: int) -> int:
    """A histogram gives each lane of a warp a bin at least."""
    return max(32, int(triton.next_power_of_2(experts)))


def _empty_plan(ids_TK: Tensor, experts: int, block_rows: int) -> Plan:
    """One allocation, every part of it aligned to 16 bytes: kernels are compiled for such pointers."""
    pairs, tiles = ids_TK.numel(), tile_bound(ids_TK.numel(), experts, block_rows)
    sizes = [pairs, pairs, experts, tiles, tiles, 1, 1]
    offsets = [0, *accumulate(-(-size // 4) * 4 for size in sizes)]
    whole = torch.empty(offsets[-1], dtype=torch.int32, device=ids_TK.device)
    order_S, place_S, ends_E, tile_expert_M, tile_row_M, tile_count_1, dropped_1 = (
        whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)
    )
    return Plan(
        order_S=order_S,
        place_S=place_S,
        ends_E=ends_E,
        slots=ids_TK.shape[1],
        block_rows=block_rows,
        tile_expert_M=tile_expert_M,
        tile_row_M=tile_row_M,
        tile_count_1=tile_count_1,
        dropped_1=dropped_1,
    )
