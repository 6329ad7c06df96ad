"""One grouped call for the rows of several clients of a seat whose steps began together.

The two functions replace :func:`moe_kernels.exchange.op.take_rows` and :func:`~moe_kernels.exchange.op.send_answers`
for all members at once; clients need not know. Weights are read once for all rows of the call. A member whose rows do
not come is left out for the rest of the step, and the others go on. :mod:`moe_kernels.exchange.layout` names the words
of the control block for members.
Legend: M members, R rows that each has room for, C = M x R, D hidden size, K slots, E experts.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moe_kernels import backend
from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.layout import MAX_MEMBERS, Layout


def take_joined(joined: Joined, control: Tensor, *, layout: Layout, members: int, bucket: int, exchange: int) -> None:
    """Wait for every member's rows of an exchange, and copy them into ``joined``.

    Args:
        layout: layout of every member's memory.
        members: number of members that the call has room for: 2, 4 or 8.
        bucket: rows that each member has room for.
    """
    assert members <= MAX_MEMBERS
    assert joined.x_CD.shape[0] == members * bucket
    with backend.device_of(control):
        _ways(control).take_joined(joined, control, layout, members, bucket, exchange)


def send_joined(
    y: Tensor,
    joined: Joined,
    counts_E: Tensor,
    control: Tensor,
    *,
    layout: Layout,
    members: int,
    bucket: int,
    exchange: int,
) -> None:
    """Send ``y``, ``[C, D]`` or ``[C, K, D]`` where answers are unsummed, to all members of the call; set the flags.

    Args:
        counts_E: int64, pairs by expert so far, to which the pairs of the call are added.
    """
    with backend.device_of(y):
        _ways(y).send_joined(y.contiguous(), joined, counts_E, control, layout, members, bucket, exchange)


def _ways(tensor: Tensor) -> ModuleType:
    if backend.use_triton(tensor):
        from moe_kernels.exchange.joined import launch as exchange_joined_launch

        return exchange_joined_launch
    from moe_kernels.exchange.joined import reference as exchange_joined_torch

    return exchange_joined_torch
