"""Kernels of :mod:`moe_kernels.exchange.joined.op`: one grouped call takes the rows of several clients of a seat.

Legend: M members of a call, R rows that each has room for, K slots, D hidden size, E experts.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_kernels.exchange import layout as words
from moe_kernels.exchange.kernel import CHECK_EVERY, SMALL, aligned, any_slot, stopped

_DEADLINE, _GRACE, _JOB = (tl.constexpr(word) for word in (words.DEADLINE, words.GRACE, words.JOB))
_CLOCK, _MEMBERS, _MEMBER = (tl.constexpr(word) for word in (words.CLOCK, words.MEMBERS, words.MEMBER))
_INBOX, _ANSWERS = tl.constexpr(words.MEMBER_INBOX), tl.constexpr(words.MEMBER_ANSWERS)
_BASE, _LAST, _ROWS = (tl.constexpr(at) for at in (words.MEMBER_BASE, words.MEMBER_LAST, words.MEMBER_ROWS))
_GONE, _OUT, _LATE = (tl.constexpr(at) for at in (words.MEMBER_GONE, words.MEMBER_OUT, words.LATE))
_MAX_BLOCKS = tl.constexpr(words.MAX_BLOCKS)
_NEVER = tl.constexpr(1 << 62)


@triton.jit
def seen_time(control, TIMED: tl.constexpr):
    """Return nanoseconds, the same in all threads: the time that a thread has written before."""
    now = tl.zeros((), tl.int64)
    if TIMED:
        now = globaltimer()
    return tl.atomic_max(control + _CLOCK, now, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["exchange"])
def take_joined_kernel(control, exchange, M: tl.constexpr, BLOCKS: tl.constexpr, TIMED: tl.constexpr):
    """Wait until all blocks of every member are there, and say in the control block whose are.

    Left out, in this call and the rest of the step, are members whose host says so, whose rows belong to a later step,
    and those that come too late: GRACE after the first one's, DEADLINE if nobody's come.

    One program, as in :func:`moe_kernels.exchange.kernel.take_rows_kernel`.
    """
    member, number = tl.arange(0, M), tl.arange(0, BLOCKS)
    at = control + _MEMBERS + member * _MEMBER
    inbox, rows = tl.load(at + _INBOX), tl.maximum(tl.load(at + _ROWS), 1)
    want, last = tl.load(at + _BASE) + exchange + 1, tl.load(at + _LAST)
    limit, grace = tl.load(control + _DEADLINE), tl.load(control + _GRACE)
    blocks = tl.cdiv(rows, tl.cdiv(rows, _MAX_BLOCKS))
    flags = inbox.to(tl.pointer_type(tl.int64))[:, None] + number[None, :]
    listed = inbox != 0
    out = tl.load(at + _OUT)
    alive = listed & (out == 0)
    ready = alive & (inbox == 0)  # nobody's: such are not alive
    out = tl.maximum(out, 1)
    missing = tl.sum(alive.to(tl.int32), axis=0)
    stop = stopped(control)
    seen_time(control, TIMED)
    began = seen_time(control, TIMED)
    first_at = tl.zeros((), tl.int64)
    tries = 0
    while (missing != 0) & (stop == 0):
        asked = alive[:, None] & (number[None, :] < blocks[:, None])
        seen = tl.atomic_add(flags, 0, mask=asked, sem="acquire", scope="sys")
        least = tl.min(tl.where(asked, seen, _NEVER), axis=1)
        largest = tl.max(tl.where(asked, seen, 0), axis=1)
        gone = tl.atomic_add(at + _GONE, 0, mask=alive, sem="relaxed", scope="gpu")
        alive = alive & (gone == 0) & (largest <= last)
        ready = alive & (least >= want)
        missing = tl.sum((alive & (ready == 0)).to(tl.int32), axis=0)
        tl.store(at + _OUT, tl.where(alive, 0, out), mask=listed)
        tries += 1
        if (missing != 0) & (tries % CHECK_EVERY == 0):
            stop = stopped(control)
            now = seen_time(control, TIMED)
            some = tl.sum(ready.to(tl.int32), axis=0) > 0
            first_at = tl.where(some & (first_at == 0), now, first_at)
            late = tries > 0
            if TIMED:
                late = tl.where(first_at == 0, now - began > limit, now - first_at > grace)
            missing = tl.where(late, 0, missing)
    ready = ready & (stop == 0)
    out = tl.where(alive & (stop == 0), _LATE, out)
    tl.store(at + _OUT, tl.where(ready, 0, out), mask=listed)
    tl.store(control + _JOB, tl.sum(tl.where(ready, 1 << member, 0), axis=0).to(tl.int64))


@triton.jit
def takes_part(control, member):
    """Return whether the call has the member's rows."""
    return ((tl.load(control + _JOB) >> member) & 1) == 1


@triton.jit(do_not_specialize=["bucket"])
def gather_joined_kernel(
    control, x_CD, taken_CK, weights_CK, bucket, x_at, ids_at, weights_at,
    D: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copy a block of a member's (axis 1) rows, ids and weights out of its inbox; ids are -1 where it has no rows, and
    rows without an id are not copied.

    Example: members 0 and 1 with 8 and 5 rows in calls of 8 are rows 0 to 7 and 8 to 12; rows 13 to 15 are empty.
    """
    block, member = tl.program_id(0), tl.program_id(1)
    part = control + _MEMBERS + member * _MEMBER
    inbox, rows = tl.load(part + _INBOX), tl.load(part + _ROWS)
    slots, columns = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_D)[None, :]
    inside = tl.arange(0, TILE)[:, None]
    row = (block * ROWS + inside).to(tl.int64)
    room = (inside < ROWS) & (row < bucket)
    present = room & (row < rows) & takes_part(control, member)
    here = member * bucket + row
    at = row * K + slots
    ids_there = (inbox + ids_at).to(tl.pointer_type(tl.int32)) + at
    weights_there = (inbox + weights_at).to(tl.pointer_type(tl.float32)) + at
    ids = tl.load(ids_there, mask=(slots < K) & present, other=-1, cache_modifier=".cg")
    weights = tl.load(weights_there, mask=(slots < K) & present, other=0.0, cache_modifier=".cg")
    tl.store(taken_CK + here * K + slots, ids, mask=(slots < K) & room)
    tl.store(weights_CK + here * K + slots, weights, mask=(slots < K) & room)
    goes = any_slot(ids >= 0)
    x_there = aligned(inbox + x_at, x_CD.dtype.element_ty) + row * D
    for start in tl.static_range(0, D, BLOCK_D):
        column = start + columns
        tile = tl.load(x_there + column, mask=(column < D) & goes, cache_modifier=".cg")
        tl.store(x_CD + here * D + column, tile, mask=(column < D) & goes)


@triton.jit(do_not_specialize=["bucket", "exchange"], do_not_specialize_on_alignment=SMALL)
def send_joined_kernel(
    y, taken_CK, counts_E, control, bucket, exchange, y_at, E,
    D: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Send a block of answers to a member (axis 1), then set its flag, as
    :func:`moe_kernels.exchange.kernel.send_answers_kernel` does. Blocks are those of the member's own bucket."""
    block, member = tl.program_id(0), tl.program_id(1)
    part = control + _MEMBERS + member * _MEMBER
    answers, rows = tl.load(part + _ANSWERS), tl.maximum(tl.load(part + _ROWS), 1)
    block_rows = tl.cdiv(rows, _MAX_BLOCKS)
    slots, columns = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_D)[None, :]
    inside = tl.arange(0, TILE)[:, None]
    row = block * block_rows + inside
    present = (inside < block_rows) & (row < rows)
    here = member * bucket + row
    if takes_part(control, member) & (block < tl.cdiv(rows, block_rows)) & (stopped(control) == 0):
        ids = tl.load(taken_CK + here * K + slots, mask=(slots < K) & present, other=-1)
        y_there = aligned(answers + y_at, y.dtype.element_ty) + row * SLOTS * D
        for slot in tl.static_range(SLOTS):
            asked = any_slot((ids >= 0) & ((SLOTS == 1) | (slots == slot)))
            for start in tl.static_range(0, D, BLOCK_D):
                column = start + columns
                tile = tl.load(y + (here * SLOTS + slot) * D + column, mask=(column < D) & asked)
                tl.store(y_there + slot * D + column, tile, mask=(column < D) & asked)
        tl.debug_barrier()
        flag = answers.to(tl.pointer_type(tl.int64)) + block
        tl.atomic_xchg(flag, tl.load(part + _BASE) + exchange + 1, sem="release", scope="sys")
        tl.atomic_add(counts_E + ids, 1, mask=(ids >= 0) & (ids < E), sem="relaxed")  # nobody waits for these
