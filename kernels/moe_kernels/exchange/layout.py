"""The layout of an exchange's rows, ids, weights, answers and flags in the buffers that a peer writes into, in bytes.

    inbox, with the experts:        per micro-batch  flags | x [R, D] | ids [R, K] int32 | weights [R, K] float32
    answers, with the attention:    per micro-batch  flags | y [R, A, D], A = 1, or K if they come unsummed

Rows go in blocks. The flag of a block holds the number of the exchange that the block belongs to. A control block on
the device steers a step's kernels: int64 words, which the constants below name.
Legend: R largest number of rows, D hidden size, K slots, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

FAILED: Final = 0
"""0, or why the step has failed: bit g if group g (at a seat: the peer) missed the deadline, ABORTED by the host."""
BASE: Final = 1
"""Number of the exchange before the step's first one."""
DEADLINE: Final = 2
"""Longest wait, in nanoseconds."""
LAST: Final = 3
"""Number of the step's last exchange; used at a seat."""
PEER: Final = 4
"""Address of the attention worker's answers; used at a seat."""
MAX_GROUPS: Final = 32
INBOX: Final = 8
"""Word INBOX + g has the address of the inbox of group g's seat, 0 without one; used at the attention worker."""
ANSWERS: Final = INBOX + MAX_GROUPS
"""Word ANSWERS + g has the address of the buffer into which that seat writes answers."""
WORDS: Final = ANSWERS + MAX_GROUPS
ABORTED: Final = 1 << 62

GRACE: Final = 5
"""Joined calls: grace period, in nanoseconds. A call waits so long for late members after the first member's rows."""
JOB: Final = 6
"""Joined calls: bit m is set if the running call has the rows of member m."""
CLOCK: Final = 7
"""Joined calls: the time in nanoseconds, by which the threads of a program agree on what is late."""
MAX_MEMBERS: Final = 8
MEMBERS: Final = 8
"""Joined calls: index of the first member's words. Each member has MEMBER words, which MEMBER constants name."""
MEMBER: Final = 8
MEMBER_INBOX: Final = 0
"""Address of the member's inbox; 0 if there is no such member."""
MEMBER_ANSWERS: Final = 1
MEMBER_BASE: Final = 2
MEMBER_LAST: Final = 3
MEMBER_ROWS: Final = 4
"""The bucket of the member's step."""
MEMBER_GONE: Final = 5
"""The host sets this to leave the member out from the next call on."""
MEMBER_OUT: Final = 6
"""Kernels set this when the member is left out and its memory is unused; LATE says that its rows came too late."""
LATE: Final = 2

MAX_BLOCKS: Final = 256
_ALIGNMENT: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sizes of both buffers, and the offsets in them.

    Args:
        rows: R, the largest number of rows of a micro-batch.
        unsummed: the answer has one row per pair of a row and a slot instead of one per row.
    """

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
        """Return the offset of a micro-batch's part of the inbox."""
        return micro_batch * (self.weights_at + _padded(self.rows * self.slots * 4))

    def answers_section(self, micro_batch: int) -> int:
        """Return the offset of a micro-batch's part of the answers."""
        width = self.answer_slots * self.hidden * self.dtype.itemsize
        return micro_batch * (self.y_at + _padded(self.rows * width))

    def block_rows(self, bucket: int) -> int:
        """Return the rows of one block in a call of up to ``bucket`` rows."""
        return -(-bucket // MAX_BLOCKS)

    def blocks(self, bucket: int) -> int:
        """Return the number of blocks in a call of up to ``bucket`` rows."""
        return -(-bucket // self.block_rows(bucket))


def member_word(member: int, word: int) -> int:
    """Return the index of a member's word in the control block of joined calls; ``word`` is a MEMBER constant."""
    return MEMBERS + member * MEMBER + word


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
