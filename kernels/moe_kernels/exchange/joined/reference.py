"""References of the kernels of joined calls for memory of the host. Legend: M members, R rows of a member, K slots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.layout import (
    DEADLINE,
    FAILED,
    GRACE,
    JOB,
    LATE,
    MEMBER,
    MEMBER_ANSWERS,
    MEMBER_BASE,
    MEMBER_GONE,
    MEMBER_INBOX,
    MEMBER_LAST,
    MEMBER_OUT,
    MEMBER_ROWS,
    Layout,
    member_word,
)
from moe_kernels.exchange.reference import PAUSE_S, at


def take_joined(joined: Joined, control: Tensor, layout: Layout, members: int, bucket: int, exchange: int) -> None:
    alive = [_Member(control, number, layout) for number in range(members)]
    alive = [member for member in alive if member.words[MEMBER_INBOX] and not member.words[MEMBER_OUT]]
    until, first = time.monotonic_ns() + int(control[DEADLINE]), True
    while not int(control[FAILED]):
        for member in [one for one in alive if one.left()]:
            member.words[MEMBER_OUT] = 1
            alive.remove(member)
        ready = [member for member in alive if member.ready(exchange)]
        if len(ready) == len(alive):
            break
        if ready and first:
            until, first = time.monotonic_ns() + int(control[GRACE]), False
        if time.monotonic_ns() > until:
            for member in alive:
                member.words[MEMBER_OUT] = 0 if member in ready else LATE
            alive = ready
            break
        time.sleep(PAUSE_S)
    if int(control[FAILED]):
        for member in alive:
            member.words[MEMBER_OUT] = 1
        alive = []
    control[JOB] = sum(1 << member.number for member in alive)
    joined.taken_CK.fill_(-1)
    for member in alive:
        member.copy_into(joined, bucket)


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
    if int(control[FAILED]):
        return
    y_CAD = y.view(members * bucket, layout.answer_slots, layout.hidden)
    for member in _taking_part(control, members, layout):
        answers, start = int(member.words[MEMBER_ANSWERS]), member.number * bucket
        here = slice(start, start + member.rows)
        taken_RK = joined.taken_CK[here]
        asked_RA = taken_RK >= 0 if layout.unsummed else (taken_RK >= 0).any(1, keepdim=True)
        there_RAD = at(answers + layout.y_at, (member.rows, layout.answer_slots, layout.hidden), layout.dtype)
        there_RAD[asked_RA] = y_CAD[here][asked_RA]
        taken = taken_RK.flatten().long()
        counts_E.scatter_add_(0, taken.clamp(min=0), (taken >= 0).to(counts_E.dtype))
        number = int(member.words[MEMBER_BASE]) + exchange + 1
        at(answers, (layout.blocks(member.rows),), torch.int64).fill_(number)


@dataclass(slots=True, eq=False)
class _Member:
    control: Tensor
    number: int
    layout: Layout

    @property
    def words(self) -> Tensor:
        return self.control[member_word(self.number, 0) :][:MEMBER]

    @property
    def rows(self) -> int:
        return int(self.words[MEMBER_ROWS])

    def left(self) -> bool:
        """Return whether the host leaves the member out, or rows of a later step have come."""
        return bool(self.words[MEMBER_GONE]) or int(self._flags().max()) > int(self.words[MEMBER_LAST])

    def ready(self, exchange: int) -> bool:
        return int(self._flags().min()) > int(self.words[MEMBER_BASE]) + exchange

    def copy_into(self, joined: Joined, bucket: int) -> None:
        layout, inbox = self.layout, int(self.words[MEMBER_INBOX])
        here = slice(self.number * bucket, self.number * bucket + self.rows)
        ids_RK = at(inbox + layout.ids_at, (self.rows, layout.slots), torch.int32)
        joined.taken_CK[here] = ids_RK
        joined.weights_CK[here] = at(inbox + layout.weights_at, (self.rows, layout.slots), torch.float32)
        asked_R = (ids_RK >= 0).any(1)
        joined.x_CD[here][asked_R] = at(inbox + layout.x_at, (self.rows, layout.hidden), layout.dtype)[asked_R]

    def _flags(self) -> Tensor:
        return at(int(self.words[MEMBER_INBOX]), (self.layout.blocks(self.rows),), torch.int64)


def _taking_part(control: Tensor, members: int, layout: Layout) -> Iterator[_Member]:
    job = int(control[JOB])
    for number in range(members):
        if job >> number & 1:
            yield _Member(control, number, layout)
