"""A seat's joined calls and fake clients of it, in one process.

Clients' own ends are the references of :mod:`moe_kernels.exchange.op`; the path that a test runs on is that of the
joined calls.
Legend: T rows of a client, C rows of a call, D hidden size, K slots, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.exchange.joined.op import send_joined, take_joined
from moe_kernels.exchange.joined.room import Joined
from moe_kernels.exchange.layout import (
    ANSWERS,
    BASE,
    DEADLINE,
    GRACE,
    INBOX,
    JOB,
    MEMBER_ANSWERS,
    MEMBER_BASE,
    MEMBER_INBOX,
    MEMBER_LAST,
    MEMBER_OUT,
    MEMBER_ROWS,
    WORDS,
    Layout,
    member_word,
)
from moe_kernels.exchange.op import send_rows, sum_answers

EXPERTS, HIDDEN, SLOTS = 8, 48, 3
GROUP_OF_E = torch.zeros(EXPERTS, dtype=torch.int32)
SCALE_E = torch.tensor([1, 2, 3, 4, -5, 6, 7, -8, 0])
SOON_NS = 20_000_000
Rows = tuple[Tensor, Tensor, Tensor]


def words(values: dict[int, int]) -> Tensor:
    control = torch.zeros(WORDS, dtype=torch.int64)
    for number, value in {DEADLINE: SOON_NS, **values}.items():
        control[number] = value
    return control


def rows_of(rows: int, seed: int = 0) -> Rows:
    """Small whole numbers, distinct experts, some slots empty, weights that are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-4, 5, (rows, HIDDEN), generator=generator).float()
    ids_TK = torch.rand(rows, EXPERTS, generator=generator).topk(SLOTS, dim=1).indices
    ids_TK[torch.rand(rows, SLOTS, generator=generator) < 0.2] = -1
    return x_TD, ids_TK, torch.tensor([0.5, 0.25, 2]).expand(rows, SLOTS)


def expected(rows: Rows) -> Tensor:
    x_TD, ids_TK, weights_TK = rows
    return (SCALE_E[ids_TK] * weights_TK).sum(1, keepdim=True) * x_TD


class Client:
    """An attention worker and the memory that it shares with the seat."""

    def __init__(self, layout: Layout, bucket: int, base: int = 0) -> None:
        self.layout, self.bucket, self.base = layout, bucket, base
        self.inbox = torch.zeros(layout.inbox_bytes, dtype=torch.uint8)
        self.answers = torch.zeros(layout.answers_bytes, dtype=torch.uint8)
        self.sent_E = torch.zeros(EXPERTS, dtype=torch.int64)
        self.control = words({BASE: base, INBOX: self.inbox.data_ptr(), ANSWERS: self.answers.data_ptr()})

    def send(self, rows: Rows, exchange: int = 0) -> None:
        with backend.forced("torch"):
            send_rows(*rows, GROUP_OF_E, self.sent_E, self.control, exchange=exchange, micro_batch=0, groups=1,
                      bucket=self.bucket, layout=self.layout)  # fmt: skip

    def sum(self, rows: Rows, exchange: int = 0) -> Tensor:
        with backend.forced("torch"):
            return sum_answers(*rows[1:], GROUP_OF_E, self.control, exchange=exchange, micro_batch=0, groups=1,
                               bucket=self.bucket, layout=self.layout)  # fmt: skip


class Seat:
    """Calls for ``clients``, of whom None is no member."""

    def __init__(self, clients: Sequence[Client | None], layout: Layout, *, members: int, bucket: int) -> None:
        self.layout, self.members, self.bucket = layout, members, bucket
        facts: dict[int, int] = {}
        for number, client in enumerate(clients):
            if client is not None:
                facts |= {
                    self.at(number, MEMBER_INBOX): client.inbox.data_ptr(),
                    self.at(number, MEMBER_ANSWERS): client.answers.data_ptr(),
                    self.at(number, MEMBER_BASE): client.base,
                    self.at(number, MEMBER_LAST): client.base + 10,
                    self.at(number, MEMBER_ROWS): client.bucket,
                }
        self.control = words({GRACE: SOON_NS, **facts})
        self.joined = Joined.room(members * bucket + 8, layout, torch.device("cpu")).of(members * bucket)
        self.joined.taken_CK.fill_(5)
        self.joined.x_CD.fill_(torch.nan)
        self.counts_E = torch.zeros(EXPERTS, dtype=torch.int64)

    at = staticmethod(member_word)

    def take(self, exchange: int = 0) -> int:
        """Whose rows the call has."""
        take_joined(self.joined, self.control, layout=self.layout, members=self.members, bucket=self.bucket,
                    exchange=exchange)  # fmt: skip
        return int(self.control[JOB])

    def answer(self, exchange: int = 0) -> None:
        joined = self.joined
        scale_CK = SCALE_E[joined.taken_CK.long()]
        y_CKD = scale_CK.unsqueeze(2) * joined.x_CD.nan_to_num(7).unsqueeze(1)
        if not self.layout.unsummed:
            y_CKD = (joined.weights_CK.unsqueeze(2) * y_CKD).sum(1)
        send_joined(y_CKD, joined, self.counts_E, self.control, layout=self.layout, members=self.members,
                    bucket=self.bucket, exchange=exchange)  # fmt: skip

    def out(self) -> list[int]:
        return [int(self.control[self.at(number, MEMBER_OUT)]) for number in range(self.members)]


def layout_of(rows: int = 40, *, unsummed: bool = False) -> Layout:
    return Layout(rows=rows, hidden=HIDDEN, slots=SLOTS, dtype=torch.float32, unsummed=unsummed)


def pair(*, unsummed: bool = False) -> tuple[Client, Client, Seat]:
    layout = layout_of(unsummed=unsummed)
    first, other = Client(layout, 8), Client(layout, 8, base=70)
    return first, other, Seat([first, other], layout, members=2, bucket=8)
