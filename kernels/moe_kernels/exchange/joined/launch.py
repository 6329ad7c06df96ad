"""Launches of :mod:`moe_kernels.exchange.joined.kernel`."""

from __future__ import annotations

import triton
from torch import Tensor

from moe_kernels.exchange.joined.kernel import gather_joined_kernel, send_joined_kernel, take_joined_kernel
from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.launch import TIMED, tile_of
from moe_kernels.exchange.layout import MAX_BLOCKS, Layout


def take_joined(joined: Joined, control: Tensor, layout: Layout, members: int, bucket: int, exchange: int) -> None:
    max_blocks = min(bucket, MAX_BLOCKS)
    take_joined_kernel[(1,)](
        control, exchange, M=members, BLOCKS=triton.next_power_of_2(max_blocks), TIMED=TIMED, num_warps=4
    )  # fmt: skip
    gather_joined_kernel[(layout.blocks(bucket), members)](
        control, joined.x_CD, joined.taken_CK, joined.weights_CK, bucket, layout.x_at, layout.ids_at,
        layout.weights_at, D=layout.hidden, K=layout.slots, BLOCK_K=triton.next_power_of_2(layout.slots),
        **tile_of(layout, bucket),
    )  # fmt: skip


def send_joined(
    y: Tensor,
    joined: Joined,
    counts_E: Tensor,
    control: Tensor,
    layout: Layout,
    members: int,
    bucket: int,
    exchange: int,
) -> None:
    tile = tile_of(layout, bucket)
    del tile["ROWS"]  # every member has its own
    send_joined_kernel[(min(bucket, MAX_BLOCKS), members)](
        y, joined.taken_CK, counts_E, control, bucket, exchange, layout.y_at, counts_E.numel(), D=layout.hidden,
        K=layout.slots, BLOCK_K=triton.next_power_of_2(layout.slots), SLOTS=layout.answer_slots, **tile,
    )  # fmt: skip
