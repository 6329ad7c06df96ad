"""Launches of :mod:`moe_kernels.exchange.kernel`: what a layout and a bucket mean for their grids."""

from __future__ import annotations

import triton
from torch import Tensor

from moe_kernels import backend
from moe_kernels.exchange.kernel import (
    send_answers_kernel,
    send_rows_kernel,
    sum_answers_kernel,
    take_rows_kernel,
    wait_answers_kernel,
)
from moe_kernels.exchange.layout import Layout

MAX_ELEMENTS = 16_384
"""Largest tile: eight warps hold it in half of their registers."""
MAX_IDS = 4096
"""Ids that a program copies at a time: each round costs the latency of a load."""
FEW_IDS = 128
"""Up to so many pairs of a bucket are counted while rows are taken, more pairs after their answers were sent. Round
trips on two H200, over bare puts, of 64 / 512 / 4096 pairs: 1.28 / 1.245 / 1.31 the first way, 1.33 / 1.22 / 1.22 the
second, 1.27 / 1.20 / 1.21 both."""
TIMED = not backend.INTERPRETED


def send_rows(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    group_of_E: Tensor,
    counts_E: Tensor,
    control: Tensor,
    layout: Layout,
    groups: int,
    bucket: int,
    exchange: int,
    micro_batch: int,
) -> None:
    rows, slots = ids_TK.shape
    tile = tile_of(layout, bucket)
    send_rows_kernel[(layout.blocks(bucket), groups)](
        x_TD, ids_TK, weights_TK, group_of_E, counts_E, control, rows, bucket, exchange, x_TD.stride(0),
        layout.inbox_section(micro_batch), layout.x_at, layout.ids_at, layout.weights_at, group_of_E.numel(),
        D=layout.hidden, K=slots, BLOCK_K=triton.next_power_of_2(slots), **tile,
    )  # fmt: skip


def take_rows(
    flags: Tensor,
    ids_RK: Tensor,
    taken_RK: Tensor,
    counts_E: Tensor,
    control: Tensor,
    layout: Layout,
    bucket: int,
    exchange: int,
) -> None:
    blocks, pairs = layout.blocks(bucket), bucket * layout.slots
    take_rows_kernel[(1,)](
        flags, ids_RK, taken_RK, counts_E, control, blocks, pairs, exchange, counts_E.numel(),
        BLOCKS=triton.next_power_of_2(blocks), BLOCK=min(MAX_IDS, max(128, triton.next_power_of_2(pairs))),
        COUNTS=_few(layout, bucket), TIMED=TIMED, num_warps=4,
    )  # fmt: skip


def send_answers(
    y: Tensor,
    taken_RK: Tensor,
    counts_E: Tensor,
    control: Tensor,
    layout: Layout,
    bucket: int,
    exchange: int,
    micro_batch: int,
) -> None:
    tile = tile_of(layout, bucket)
    send_answers_kernel[(layout.blocks(bucket),)](
        y, taken_RK, counts_E, control, bucket, exchange, layout.answers_section(micro_batch), layout.y_at,
        counts_E.numel(),
        D=layout.hidden, K=layout.slots, BLOCK_K=triton.next_power_of_2(layout.slots), SLOTS=layout.answer_slots,
        COUNTS=not _few(layout, bucket), **tile,
    )  # fmt: skip


def sum_answers(
    ids_TK: Tensor,
    weights_TK: Tensor,
    group_of_E: Tensor,
    control: Tensor,
    y_TD: Tensor,
    layout: Layout,
    groups: int,
    bucket: int,
    exchange: int,
    micro_batch: int,
    shared_gpu: bool,
) -> None:
    tile = tile_of(layout, bucket)
    section, blocks = layout.answers_section(micro_batch), layout.blocks(bucket)
    if shared_gpu:
        wait_answers_kernel[(1,)](
            control, blocks, exchange, section, groups, BLOCKS=triton.next_power_of_2(blocks), TIMED=TIMED, num_warps=1
        )  # fmt: skip
    sum_answers_kernel[(blocks, triton.cdiv(layout.hidden, tile["BLOCK_D"]))](
        ids_TK, weights_TK, group_of_E, control, y_TD, ids_TK.shape[0], exchange,
        section, layout.y_at, group_of_E.numel(), groups,
        D=layout.hidden, K=layout.slots, BLOCK_K=triton.next_power_of_2(layout.slots), SLOTS=layout.answer_slots,
        WAITS=not shared_gpu, TIMED=TIMED, **tile,
    )  # fmt: skip


def _few(layout: Layout, bucket: int) -> bool:
    return bucket * layout.slots <= FEW_IDS


def tile_of(layout: Layout, bucket: int) -> dict[str, int]:
    """Rows and columns that a program moves at a time, and its warps: 16 elements for each thread, or more."""
    rows = layout.block_rows(bucket)
    tile = triton.next_power_of_2(rows)
    block = min(triton.next_power_of_2(layout.hidden), 4096, MAX_ELEMENTS // tile)
    return {"ROWS": rows, "TILE": tile, "BLOCK_D": block, "num_warps": min(8, max(1, tile * block // 512))}
