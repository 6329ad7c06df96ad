"""References of the exchange's kernels for memory of the host: what they mean, and the link between processes on CPUs.

Addresses are those of this process. Legend: T rows, D hidden size, K slots, G groups, E experts.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.exchange.layout import ANSWERS, BASE, DEADLINE, FAILED, INBOX, LAST, PEER, Layout

PAUSE_S = 20e-6


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
    group_TK = _groups(ids_TK, group_of_E)
    for group in range(groups):
        if int(control[FAILED]) or not int(control[INBOX + group]):
            continue
        inbox = int(control[INBOX + group]) + layout.inbox_section(micro_batch)
        here_TK = group_TK == group
        counts_E += torch.bincount(ids_TK[here_TK].long(), minlength=len(counts_E))
        asked_T = here_TK.any(1)
        x_RD = at(inbox + layout.x_at, (bucket, layout.hidden), layout.dtype)
        x_RD[:rows][asked_T] = x_TD[asked_T]
        ids_RK = at(inbox + layout.ids_at, (bucket, slots), torch.int32)
        ids_RK[:rows] = torch.where(here_TK, ids_TK, -1).int()
        ids_RK[rows:] = -1
        weights_RK = at(inbox + layout.weights_at, (bucket, slots), torch.float32)
        weights_RK[:rows] = torch.where(here_TK, weights_TK, 0)
        _flags(inbox, layout, bucket).fill_(int(control[BASE]) + exchange + 1)


def take_rows(
    flags: Tensor,
    ids_RK: Tensor,
    taken_RK: Tensor,
    _counts_E: Tensor,
    control: Tensor,
    layout: Layout,
    bucket: int,
    exchange: int,
) -> None:
    want, last = int(control[BASE]) + exchange + 1, int(control[LAST])
    seen = flags[: layout.blocks(bucket)]
    late = _Late(control)
    while int(seen.min()) < want and int(seen.max()) <= last and not int(control[FAILED]) and not late():
        time.sleep(PAUSE_S)
    if int(seen.min()) < want or int(seen.max()) > last:
        control[FAILED] |= 1
    taken_RK[:bucket] = -1 if int(control[FAILED]) else ids_RK[:bucket]


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
    if int(control[FAILED]):
        return
    answers = int(control[PEER]) + layout.answers_section(micro_batch)
    asked = (taken_RK[:bucket] >= 0).flatten() if layout.unsummed else (taken_RK[:bucket] >= 0).any(1)
    there = at(answers + layout.y_at, (bucket * layout.answer_slots, layout.hidden), layout.dtype)
    there[asked] = y.view(there.shape)[asked]
    taken = taken_RK[:bucket].flatten().long()
    counts_E.scatter_add_(0, taken.clamp(min=0), (taken >= 0).to(counts_E.dtype))
    _flags(answers, layout, bucket).fill_(int(control[BASE]) + exchange + 1)


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
    _shared_gpu: bool,
) -> None:
    y_TD.zero_()
    section = layout.answers_section(micro_batch)
    addresses = [int(control[ANSWERS + group]) for group in range(groups)]
    want = int(control[BASE]) + exchange + 1
    for group, address in enumerate(addresses):
        if address:
            _wait_for(_flags(address + section, layout, bucket), want, control, 1 << group)
    if int(control[FAILED]):
        return
    group_TK = _groups(ids_TK, group_of_E)
    total_TD = torch.zeros(y_TD.shape, dtype=torch.float32)
    shape = (bucket, layout.answer_slots, layout.hidden)
    answered = {
        group: at(address + section + layout.y_at, shape, layout.dtype)[: len(y_TD)]
        for group, address in enumerate(addresses)
        if address
    }
    if not layout.unsummed:
        for group, y_TAD in answered.items():
            total_TD += torch.where((group_TK == group).any(1, keepdim=True), y_TAD[:, 0], 0)
    else:
        for slot in range(layout.slots):
            for group, y_TAD in answered.items():
                part_TD = y_TAD[:, slot] * weights_TK[:, slot : slot + 1]
                total_TD += torch.where(group_TK[:, slot : slot + 1] == group, part_TD, 0)
    y_TD.copy_(total_TD)


def at(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of the host as a tensor. It must outlive the tensor."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(*shape)


def _flags(section: int, layout: Layout, bucket: int) -> Tensor:
    return at(section, (layout.blocks(bucket),), torch.int64)


def _groups(ids_TK: Tensor, group_of_E: Tensor) -> Tensor:
    known_TK = (ids_TK >= 0) & (ids_TK < len(group_of_E))
    return torch.where(known_TK, group_of_E[ids_TK.clamp(0, len(group_of_E) - 1).long()], -1)


def _wait_for(flags: Tensor, want: int, control: Tensor, bit: int) -> None:
    """Wait for ``flags``; at the deadline set ``bit`` in the failed word, unless the step has failed before."""
    late = _Late(control)
    while int(flags.min()) < want and not int(control[FAILED]):
        if late():
            control[FAILED] |= bit
        time.sleep(PAUSE_S)


class _Late:
    """Returns, when called, whether the control block's deadline has passed since it was made."""

    def __init__(self, control: Tensor) -> None:
        self._until = time.monotonic_ns() + int(control[DEADLINE])

    def __call__(self) -> bool:
        return time.monotonic_ns() > self._until
