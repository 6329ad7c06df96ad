"""Send rows to experts in other processes of the node, and answers back, by memory that the other side maps.

An exchange is: :func:`send_rows` at the attention worker, :func:`take_rows`, the experts and :func:`send_answers` at
each seat, :func:`sum_answers` at the attention worker. All of it is one-sided: a side puts data into the peer's memory,
and then a flag. Every wait has a deadline; when one has passed, the rest of the step does nothing. A CUDA graph can
hold the calls: addresses and numbers, which change from step to step, lie in a control block on the device, whose words
:mod:`moe_kernels.exchange.layout` names. Numbers of exchanges only grow, so that a step can be run again: no old answer
is mistaken for a new one. Only links should call these functions: addresses are not checked.
Legend: T rows, R rows of a bucket, D hidden size, K slots, E experts, G groups.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.exchange.layout import Layout


def send_rows(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    group_of_E: Tensor,
    counts_E: Tensor,
    control: Tensor,
    *,
    layout: Layout,
    groups: int,
    bucket: int,
    exchange: int,
    micro_batch: int,
) -> None:
    """Send rows to the seat of each group that has one in ``control``, with the ids of that group, and set the flags.

    Args:
        ids_TK: int32 or int64; -1, or an expert of a group without a seat here, is left out.
        weights_TK: float32.
        group_of_E: int32, group by expert id, of this layer.
        counts_E: int64, pairs by expert so far, to which the pairs that are sent are added.
        bucket: rows of this call, rounded up to what the seats have prepared for; T <= bucket <= ``layout.rows``.
        exchange: counted from 0 within the step.
    """
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    with backend.device_of(x_TD):
        _ways(x_TD).send_rows(
            x_TD, ids_TK.contiguous(), weights_TK.contiguous(), group_of_E, counts_E, control, layout, groups, bucket,
            exchange, micro_batch,
        )  # fmt: skip


def take_rows(
    inbox: Tensor,
    taken_RK: Tensor,
    counts_E: Tensor,
    control: Tensor,
    *,
    layout: Layout,
    bucket: int,
    exchange: int,
    micro_batch: int,
) -> tuple[Tensor, Tensor]:
    """Wait for an exchange's rows; return ``x_RD`` and float32 ``weights_RK`` as views of the inbox.

    All ids are -1 if the rows do not come in time, or belong to a later step: then this step has failed.

    Args:
        inbox: uint8, ``layout.inbox_bytes``, 256-byte aligned.
        taken_RK: int32; the ids are written here.
        counts_E: int64, pairs by expert so far; :func:`send_answers` must get the same tensor. One of both functions
            counts an exchange, so that rows that are taken and never answered may be counted or not.
    """
    section = inbox[layout.inbox_section(micro_batch) : layout.inbox_section(micro_batch + 1)]
    flags = section[: layout.x_at].view(torch.int64)
    x_RD = section[layout.x_at :][: bucket * layout.hidden * layout.dtype.itemsize].view(layout.dtype)
    ids_RK, weights_RK = (
        section[start:][: bucket * layout.slots * 4].view(dtype).view(bucket, layout.slots)
        for start, dtype in ((layout.ids_at, torch.int32), (layout.weights_at, torch.float32))
    )
    with backend.device_of(inbox):
        _ways(inbox).take_rows(flags, ids_RK, taken_RK, counts_E, control, layout, bucket, exchange)
    return x_RD.view(bucket, layout.hidden), weights_RK


def send_answers(
    y: Tensor,
    taken_RK: Tensor,
    counts_E: Tensor,
    control: Tensor,
    *,
    layout: Layout,
    bucket: int,
    exchange: int,
    micro_batch: int,
) -> None:
    """Send ``y``, ``[R, D]`` or ``[R, K, D]`` where answers are unsummed, to the attention worker, and set the flags.

    Args:
        taken_RK, counts_E: the tensors of :func:`take_rows`.
    """
    with backend.device_of(y):
        _ways(y).send_answers(y.contiguous(), taken_RK, counts_E, control, layout, bucket, exchange, micro_batch)


def sum_answers(
    ids_TK: Tensor,
    weights_TK: Tensor,
    group_of_E: Tensor,
    control: Tensor,
    *,
    layout: Layout,
    groups: int,
    bucket: int,
    exchange: int,
    micro_batch: int,
    shared_gpu: bool = False,
) -> Tensor:
    """Wait for the seats' answers and return their sum ``y_TD``, in ``layout.dtype``; 0 where the step has failed.

    Summed answers are added in float32 in the order of groups; unsummed answers are weighted and added slot by slot, as
    :func:`moe_kernels.fused_moe` does.

    Args:
        shared_gpu: seats compute on this GPU; waiting then leaves the SMs to their kernels, and takes longer.
    """
    y_TD = torch.empty(ids_TK.shape[0], layout.hidden, dtype=layout.dtype, device=ids_TK.device)
    with backend.device_of(ids_TK):
        _ways(ids_TK).sum_answers(
            ids_TK.contiguous(), weights_TK.contiguous(), group_of_E, control, y_TD, layout, groups, bucket, exchange,
            micro_batch, shared_gpu,
        )  # fmt: skip
    return y_TD


def _ways(tensor: Tensor) -> ModuleType:
    if backend.use_triton(tensor):
        from moe_kernels.exchange import launch as exchange_launch

        return exchange_launch
    from moe_kernels.exchange import reference as exchange_torch

    return exchange_torch
