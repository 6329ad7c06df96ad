"""Chosen experts in, the order in which grouped kernels take their pairs out: sorted by expert, cut into tiles.

Nothing is padded in memory and nothing is read back to the host, so a plan can be made inside a CUDA graph.
Legend: T rows, K slots per row, S = T x K pairs (pair p = t x K + k), E experts here, M tiles at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import check_plan
from moe_kernels.plan.types import FirstCome, Plan, tile_bound


@backend.eager
def plan(
    ids_TK: Tensor,
    experts: int,
    *,
    block_rows: int = 128,
    capacity: int | None = None,
    first_come: FirstCome = "token",
    keep_T: Tensor | None = None,
    local_E: Tensor | None = None,
) -> Plan:
    """Sort pairs by expert, stably, and list the tiles of ``block_rows`` rows that cover each expert's run.

    With ``capacity`` an expert takes its first ``capacity`` pairs in the order of ``first_come`` and drops the rest
    (the operator of ExpertFlow 5.1, whose algorithms 5.2 and 5.3 serve an expert's pairs in the order of a stable
    sort and drop those at or past C; GShard's algorithm 1, which serves first choices first, is ``slot``).

    Args:
        ids_TK: int32 or int64; ids outside 0..experts-1 are experts elsewhere.
        experts: how many there are here.
        block_rows: rows of a tile, 1 to 2**30; the products by expert take plans of 16, 32, 64 or 128.
        keep_T: bool; rows where it is false (sequences that have ended) take part in nothing.
        local_E: int32, global expert id to the id here, -1 = elsewhere; ``ids_TK`` then holds global ids, and those
            outside the table are elsewhere.

    Returns:
        A :class:`Plan` on the device of ``ids_TK``. On CUDA one launch up to 4,096 pairs (fewer above 128 experts),
        three above; with a capacity twice as many.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.

    Example: ids ``[[1, 0], [1, 7], [0, 1]]``, 2 experts, ``block_rows=2``. Expert 0 has pairs 1, 4 and expert 1 pairs
    0, 2, 5; pair 3 is elsewhere: order ``[1, 4, 0, 2, 5, 3]``, place ``[2, 0, 3, -1, 1, 4]``, ends ``[2, 5]``, tile
    experts ``[0, 1, 1, -1, -1]``, tile rows ``[0, 2, 4, -1, -1]``, 3 tiles. ``capacity=2`` drops pair 5: order
    ``[1, 4, 0, 2, 3, 5]``, ends ``[2, 4]``; by ``slot`` expert 1 still serves pairs 0, 2 (slot 0) before 5 (slot 1),
    expert 0 pair 4 before pair 1.
    """
    check_plan(ids_TK, experts, block_rows, capacity, first_come, keep_T, local_E)
    # Without pairs there is nothing to launch.
    if backend.use_triton(ids_TK) and ids_TK.numel():
        from moe_kernels.plan import launch as plan_launch

        with backend.device_of(ids_TK):
            return plan_launch.launch(ids_TK, experts, block_rows, capacity, first_come, keep_T, local_E)
    wanted_S = _local_experts(ids_TK, experts, keep_T, local_E)
    expert_S = wanted_S if capacity is None else _drop(wanted_S, experts, capacity, first_come, ids_TK.shape[1])
    order_S, ends_E = _sort(expert_S, experts)
    rank_S = torch.arange(len(order_S), dtype=torch.int32, device=ids_TK.device)
    place_S = torch.empty_like(rank_S).scatter_(0, order_S, rank_S).masked_fill(expert_S == experts, -1)
    tile_expert_M, tile_row_M, tile_count_1 = _tiles(ends_E, len(order_S), block_rows)
    return Plan(
        order_S=order_S.int(),
        place_S=place_S,
        ends_E=ends_E,
        slots=ids_TK.shape[1],
        block_rows=block_rows,
        tile_expert_M=tile_expert_M,
        tile_row_M=tile_row_M,
        tile_count_1=tile_count_1,
        dropped_1=((expert_S == experts).sum() - (wanted_S == experts).sum()).int().view(1),
    )


def local_ids(ids_TK: Tensor, experts: int, keep_T: Tensor | None, local_E: Tensor | None) -> Tensor:
    """Ids as indices of the experts here, negative for all that no expert here takes; int32 or int64."""
    if local_E is not None:
        known_TK = (ids_TK >= 0) & (ids_TK < len(local_E))
        ids_TK = torch.where(known_TK, local_E[ids_TK.clamp(0, len(local_E) - 1).long()], -1)
    ids_TK = torch.where(ids_TK < experts, ids_TK, -1)
    return ids_TK if keep_T is None else torch.where(keep_T.unsqueeze(1), ids_TK, -1)


def _local_experts(ids_TK: Tensor, experts: int, keep_T: Tensor | None, local_E: Tensor | None) -> Tensor:
    """int64 ``[S]``: 0..E-1, or E if no expert here takes the pair: those sort last."""
    here_TK = local_ids(ids_TK, experts, keep_T, local_E).long()
    return torch.where(here_TK >= 0, here_TK, experts).flatten()


def _sort(expert_S: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert, ties by pair, and where each expert's run ends."""
    sorted_S, order_S = expert_S.sort(stable=True)
    ids_E = torch.arange(experts, device=expert_S.device)
    return order_S, torch.searchsorted(sorted_S, ids_E, right=True, out_int32=True)


def _drop(expert_S: Tensor, experts: int, capacity: int, first_come: FirstCome, slots: int) -> Tensor:
    """``expert_S`` with E for every pair that ``capacity`` others of its expert come before."""
    arrival_S = torch.arange(len(expert_S), device=expert_S.device)
    if first_come == "slot":
        arrival_S = arrival_S.view(-1, slots).t().flatten()
    order_S, ends_E = _sort(expert_S[arrival_S], experts)
    queue_S = arrival_S[order_S]
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E])
    rank_S = torch.arange(len(queue_S), device=expert_S.device) - starts_E[expert_S[queue_S]]
    return expert_S.scatter(0, queue_S, torch.where(rank_S < capacity, expert_S[queue_S], experts))


def _tiles(ends_E: Tensor, pairs: int, block_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert and first row of every tile, -1 past the last, and how many there are."""
    starts_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    tiles_E = (ends_E - starts_E + block_rows - 1) // block_rows
    tile_ends_E = tiles_E.cumsum(0, dtype=torch.int32)
    tile_M = torch.arange(tile_bound(pairs, len(ends_E), block_rows), dtype=torch.int32, device=ends_E.device)
    expert_M = torch.searchsorted(tile_ends_E, tile_M, right=True)
    real_M = tile_M < tile_ends_E[-1]
    held_M = expert_M.clamp(max=len(ends_E) - 1)
    row_M = starts_E[held_M] + (tile_M - (tile_ends_E - tiles_E)[held_M]) * block_rows
    return torch.where(real_M, expert_M, -1).int(), torch.where(real_M, row_M, -1), tile_ends_E[-1:].clone()
