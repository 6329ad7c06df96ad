"""Where an exchange's rows, ids, weights, answers and flags lie in the buffers that a peer writes into; in bytes.

    inbox, with the experts:        per micro-batch  flags | x [R, D] | ids [R, K] int32 | weights [R, K] float32
    answers, with the attention:    per micro-batch  flags | y [R, A, D], A = 1, or K if they come unsummed

Rows go in blocks, each with a flag of its own: the number of the exchange that it belongs to. A control block (int64,
on the device) says what a step's kernels do: words by the constants below.
Legend: R most rows, D hidden size, K slots, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

FAILED: Final = 0
"""0, or why the step has ended: bit g for group g (or seat's peer) too late, ABORTED for the host."""
BASE: Final = 1
"""Number of the exchange before the step's first."""
DEADLINE: Final = 2
"""Longest wait, nanoseconds."""
LAST: Final = 3
"""Experts: number of the step's last exchange."""
PEER: Final = 4
"""Experts: address of the attention worker's answers."""
MAX_GROUPS: Final = 32
INBOX: Final = 8
"""Attention: INBOX + g is the address of the inbox of the seat that has group g, 0: no seat here."""
ANSWERS: Final = INBOX + MAX_GROUPS
"""Attention: ANSWERS + g is the address of the buffer that this seat answers into."""
WORDS: Final = ANSWERS + MAX_GROUPS
ABORTED: Final = 1 << 62

PATIENCE: Final = 5
"""Joined calls: longest wait for the others once one member's rows are there, nanoseconds."""
JOB: Final = 6
"""Joined calls: bit m for each member whose rows the call under way has."""
CLOCK: Final = 7
"""Joined calls: where one thread tells the others the time."""
MAX_MEMBERS: Final = 8
MEMBERS: Final = 8
"""Joined calls: from here on each member has MEMBER words, by the constants below."""
MEMBER: Final = 8
MEMBER_INBOX: Final = 0
"""Address; 0: no member."""
MEMBER_ANSWERS: Final = 1
MEMBER_BASE: Final = 2
MEMBER_LAST: Final = 3
MEMBER_ROWS: Final = 4
"""The bucket of the member's step."""
MEMBER_GONE: Final = 5
"""Not 0: the host wants it left out from now on."""
MEMBER_OUT: Final = 6
"""Not 0: it is left out, and nothing of the step touches its memory any more; LATE: because its rows came too late."""
LATE: Final = 2

MAX_BLOCKS: Final = 256
_ALIGNMENT: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """``unsummed``: one answer per pair instead of one per row."""

    rows: int
    hidden: int
    slots: int
    dtype: torch.dtype
    micro_batches: int = 2
    unsummed: bool = False

    @property
    def answer_slots(self) -> int:
        return self.slots if self.unsummed else 1

    @property
    def x_at(self) -> int:
        return MAX_BLOCKS * 8

    @property
    def ids_at(self) -> int:
        return self.x_at + _padded(self.rows * self.hidden * self.dtype.itemsize)

    @property
    def weights_at(self) -> int:
        return self.ids_at + _padded(self.rows * self.slots * 4)

    @property
    def y_at(self) -> int:
        return MAX_BLOCKS * 8

    @property
    def inbox_bytes(self) -> int:
        return self.inbox_section(self.micro_batches)

    @property
    def answers_bytes(self) -> int:
        return self.answers_section(self.micro_batches)

    def inbox_section(self, micro_batch: int) -> int:
        return micro_batch * (self.weights_at + _padded(self.rows * self.slots * 4))

    def answers_section(self, micro_batch: int) -> int:
        width = self.answer_slots * self.hidden * self.dtype.itemsize
        return micro_batch * (self.y_at + _padded(self.rows * width))

    def block_rows(self, bucket: int) -> int:
        """Rows of a block where a call has up to ``bucket``."""
        return -(-bucket // MAX_BLOCKS)

    def blocks(self, bucket: int) -> int:
        return -(-bucket // self.block_rows(bucket))


def member_word(member: int, word: int) -> int:
    """Where the control block of joined calls has a member's word, one of the MEMBER constants."""
    return MEMBERS + member * MEMBER + word


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
