"""Kernels of :mod:`moe_kernels.exchange.op`: rows to experts and back through memory that a peer GPU writes.

Whether a wait goes on is decided by values that atomics return, which are the same in all threads of a program;
``globaltimer`` is not, so one thread writes down lateness and all read it back.
Legend: T rows, D hidden size, K slots, E experts, G groups.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_kernels.exchange.layout import ANSWERS, BASE, DEADLINE, INBOX, LAST, PEER

SMALL = ["ids_TK", "weights_TK", "group_of_E", "counts_E"]
"""Read or counted element by element. Slices of them begin anywhere, and a kernel that is compiled for that in a step
makes every peer wait."""
CHECK_EVERY = tl.constexpr(16)
_BASE, _DEADLINE, _LAST, _PEER = (tl.constexpr(word) for word in (BASE, DEADLINE, LAST, PEER))
_INBOX, _ANSWERS = tl.constexpr(INBOX), tl.constexpr(ANSWERS)


@triton.jit
def stopped(control):
    """Return the failed word, the same in all threads."""
    return tl.atomic_or(control, 0, sem="relaxed", scope="gpu")


@triton.jit
def aligned(address, dtype: tl.constexpr):
    """Return ``address`` as a pointer that 16-byte accesses may use."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def block_tile(block, rows, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return the rows of a block, as a column, and which of them exist."""
    inside = tl.arange(0, TILE)[:, None]
    row = block * ROWS + inside
    return row.to(tl.int64), (inside < ROWS) & (row < rows)


@triton.jit
def groups_of(ids, group_of_E, E):
    """Return the group of each id, -1 where there is none."""
    known = (ids >= 0) & (ids < E)
    return tl.load(group_of_E + ids, mask=known, other=-1)


@triton.jit
def any_slot(of_slots):
    """Return for each row, as a column, whether ``of_slots`` is true for any of its slots."""
    return (tl.max(of_slots.to(tl.int32), axis=1) > 0)[:, None]


@triton.jit
def wait_for(flag, want, control, bit, TIMED: tl.constexpr):
    """Wait until ``flag[0] >= want``; return the last value seen. At the deadline ``bit`` enters the failed word, which
    ends every wait of the step. Untimed waits, as in the interpreter, where nobody else runs, end soon."""
    began = tl.zeros((), tl.int64)
    if TIMED:
        began = globaltimer()
    limit = tl.load(control + _DEADLINE)
    value = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tries = 0
    stop = tl.zeros((), tl.int64)
    while (value < want) & (stop == 0):
        value = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tries += 1
        if tries % CHECK_EVERY == 0:
            late = tries > 0
            if TIMED:
                late = globaltimer() - began > limit
            mine = tl.where(late, bit, tl.zeros((), tl.int64))
            stop = tl.atomic_or(control, mine, sem="relaxed", scope="gpu")
    return value


@triton.jit(do_not_specialize=["rows", "bucket", "exchange"], do_not_specialize_on_alignment=SMALL)
def send_rows_kernel(
    x, ids_TK, weights_TK, group_of_E, counts_E, control, rows, bucket, exchange, stride_x, section, x_at, ids_at,
    weights_at, E,
    D: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Send a block of rows (axis 0) to the inbox of a group's seat (axis 1), then set its flag. Ids of other groups
    become -1; a row without ids of the group is not copied; rows past ``rows`` are empty. Counts the pairs by expert.

    Rows are read before it is known whether they go there, as a latency costs more than the bytes.

    Example: ids ``[[3, 5]]``, expert 3 in group 0, 5 in group 1: seat 0 gets ids ``[[3, -1]]``, seat 1 ``[[-1, 5]]``.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    inbox, base = tl.load(control + _INBOX + group), tl.load(control + _BASE)
    slots, columns = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_D)[None, :]
    row, present = block_tile(block, rows, ROWS, TILE)
    ids = tl.load(ids_TK + row * K + slots, mask=(slots < K) & present, other=-1).to(tl.int64)
    first = tl.load(x + row * stride_x + columns, mask=(columns < D) & present)
    if (stopped(control) == 0) & (inbox != 0):
        inbox += section
        here = groups_of(ids, group_of_E, E) == group
        goes = any_slot(here)
        weights = tl.load(weights_TK + row * K + slots, mask=here, other=0.0)
        _, room = block_tile(block, bucket, ROWS, TILE)
        there = (slots < K) & room
        ids_there = (inbox + ids_at).to(tl.pointer_type(tl.int32)) + row * K + slots
        tl.store(ids_there, tl.where(here, ids, -1).to(tl.int32), mask=there)
        tl.store((inbox + weights_at).to(tl.pointer_type(tl.float32)) + row * K + slots, weights, mask=there)
        x_there = aligned(inbox + x_at, x.dtype.element_ty) + row * D
        tl.store(x_there + columns, first, mask=(columns < D) & goes)
        for start in tl.static_range(BLOCK_D, D, BLOCK_D):
            at = start + columns
            part = tl.load(x + row * stride_x + at, mask=(at < D) & goes)
            tl.store(x_there + at, part, mask=(at < D) & goes)
        tl.debug_barrier()
        flag = inbox.to(tl.pointer_type(tl.int64)) + block
        tl.atomic_xchg(flag, base + exchange + 1, sem="release", scope="sys")
        tl.atomic_add(counts_E + ids, 1, mask=here, sem="relaxed")  # nobody waits for these


@triton.jit(do_not_specialize=["blocks", "pairs", "exchange"], do_not_specialize_on_alignment=SMALL)
def take_rows_kernel(
    flags, ids_RK, taken_RK, counts_E, control, blocks, pairs, exchange, E,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait until every block of an exchange is there, then copy its ids; all -1 where it does not come in time, or
    where the sender has gone on to a later step. COUNTS: count the pairs by expert.

    One program, whatever the size: while it waits, the kernels of other attention workers need the other SMs.
    """
    number = tl.arange(0, BLOCKS)
    base = tl.load(control + _BASE)
    want, last, limit = base + exchange + 1, tl.load(control + _LAST), tl.load(control + _DEADLINE)
    began = tl.zeros((), tl.int64)
    if TIMED:
        began = globaltimer()
    stop = stopped(control)
    least, largest = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    tries = 0
    while (least < want) & (largest <= last) & (stop == 0):
        seen = tl.atomic_add(flags + number, 0, mask=number < blocks, sem="acquire", scope="sys")
        least = tl.min(tl.where(number < blocks, seen, want), axis=0)
        largest = tl.max(tl.where(number < blocks, seen, 0), axis=0)
        tries += 1
        if tries % CHECK_EVERY == 0:
            late = tries > 0
            if TIMED:
                late = globaltimer() - began > limit
            stop = tl.atomic_or(control, tl.where(late, 1, 0).to(tl.int64), sem="relaxed", scope="gpu")
    good = (least >= want) & (largest <= last) & (stop == 0)
    if good == 0:
        tl.atomic_or(control, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_RK + pair, mask=(pair < pairs) & good, other=-1, cache_modifier=".cg")
        tl.store(taken_RK + pair, ids, mask=pair < pairs)
        if COUNTS:
            tl.atomic_add(counts_E + ids, 1, mask=(ids >= 0) & (ids < E), sem="relaxed")


@triton.jit(do_not_specialize=["bucket", "exchange"], do_not_specialize_on_alignment=SMALL)
def send_answers_kernel(
    y, taken_RK, counts_E, control, bucket, exchange, section, y_at, E,
    D: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Send a block of answers to the attention worker, then set its flag: SLOTS rows of y per row, 1 if they are
    summed, else one per slot; rows without an id are not copied. COUNTS: then count the pairs by expert."""
    block = tl.program_id(0)
    answers, base = tl.load(control + _PEER), tl.load(control + _BASE)
    slots, columns = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_D)[None, :]
    row, present = block_tile(block, bucket, ROWS, TILE)
    ids = tl.load(taken_RK + row * K + slots, mask=(slots < K) & present, other=-1)
    first = tl.load(y + row * SLOTS * D + columns, mask=(columns < D) & present)
    if stopped(control) == 0:
        answers += section
        y_there = aligned(answers + y_at, y.dtype.element_ty) + row * SLOTS * D
        for slot in tl.static_range(SLOTS):
            asked = any_slot((ids >= 0) & ((SLOTS == 1) | (slots == slot)))
            for start in tl.static_range(0, D, BLOCK_D):
                at = start + columns
                if slot == 0 and start == 0:
                    part = first
                else:
                    part = tl.load(y + (row * SLOTS + slot) * D + at, mask=(at < D) & asked)
                tl.store(y_there + slot * D + at, part, mask=(at < D) & asked)
        tl.debug_barrier()
        flag = answers.to(tl.pointer_type(tl.int64)) + block
        tl.atomic_xchg(flag, base + exchange + 1, sem="release", scope="sys")
        if COUNTS:
            tl.atomic_add(counts_E + ids, 1, mask=(ids >= 0) & (ids < E), sem="relaxed")  # nobody waits for these


@triton.jit(do_not_specialize=["blocks", "exchange", "G"])
def wait_answers_kernel(
    control, blocks, exchange, section, G, BLOCKS: tl.constexpr, TIMED: tl.constexpr
):  # fmt: skip
    """Wait for all blocks' answers of every group, in one program: the kernels that make them may need every SM but
    one, because experts and attention share the GPU."""
    number = tl.arange(0, BLOCKS)
    want, limit = tl.load(control + _BASE) + exchange + 1, tl.load(control + _DEADLINE)
    began = tl.zeros((), tl.int64)
    if TIMED:
        began = globaltimer()
    stop = stopped(control)
    for group in range(G):
        answers = tl.load(control + _ANSWERS + group)
        flags = (answers + section).to(tl.pointer_type(tl.int64))
        bit = tl.full((), 1, tl.int64) << group
        least = tl.where(answers == 0, want, tl.zeros((), tl.int64))
        tries = 0
        while (least < want) & (stop == 0):
            seen = tl.atomic_add(flags + number, 0, mask=number < blocks, sem="acquire", scope="sys")
            least = tl.min(tl.where(number < blocks, seen, want), axis=0)
            tries += 1
            if tries % CHECK_EVERY == 0:
                late = tries > 0
                if TIMED:
                    late = globaltimer() - began > limit
                stop = tl.atomic_or(control, tl.where(late, bit, tl.zeros((), tl.int64)), sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["rows", "exchange", "G"], do_not_specialize_on_alignment=SMALL)
def sum_answers_kernel(
    ids_TK, weights_TK, group_of_E, control, y, rows, exchange, section, y_at, E, G,
    D: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WAITS: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Wait for a block's answers of every group (unless :func:`wait_answers_kernel` has done so), then sum them in
    float32: groups ascending if they are summed by their seats (SLOTS 1), else slot by slot with the weights. 0 where
    the step has failed.

    A seat's flag also says that it has read all that it was sent, so every group is waited for, asked or not.
    """
    block, part_of_D = tl.program_id(0), tl.program_id(1)
    want = tl.load(control + _BASE) + exchange + 1
    slots, columns = tl.arange(0, BLOCK_K)[None, :], part_of_D * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    row, present = block_tile(block, rows, ROWS, TILE)
    if SLOTS == 1:  # looked up while the answers are on their way
        ids = tl.load(ids_TK + row * K + slots, mask=(slots < K) & present, other=-1).to(tl.int64)
        groups = groups_of(ids, group_of_E, E)
    stop = stopped(control)
    if WAITS:
        for group in range(G):
            answers = tl.load(control + _ANSWERS + group)
            if (answers != 0) & (stop == 0):
                flag = (answers + section).to(tl.pointer_type(tl.int64)) + block
                bit = tl.full((), 1, tl.int64) << group
                if wait_for(flag, want, control, bit, TIMED) < want:
                    stop = bit
    tl.debug_barrier()
    total = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    wanted = (columns < D) & present & (stop == 0)
    if SLOTS == 1:
        for group in range(G):
            answers = tl.load(control + _ANSWERS + group)
            asked = any_slot(groups == group) & (answers != 0)
            source = aligned(answers + section + y_at, y.dtype.element_ty) + row * D + columns
            part = tl.load(source, mask=wanted & asked, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
    else:
        for slot in tl.static_range(SLOTS):
            expert = tl.load(ids_TK + row * K + slot, mask=present, other=-1).to(tl.int64)
            known = (expert >= 0) & (expert < E)
            group = tl.load(group_of_E + expert, mask=known, other=0)
            answers = tl.load(control + _ANSWERS + group)
            weight = tl.load(weights_TK + row * K + slot, mask=known & present, other=0.0)
            source = (answers + section + y_at).to(tl.pointer_type(y.dtype.element_ty))
            source = tl.multiple_of(source, (16, 16)) + (row * SLOTS + slot) * D + columns
            asked = known & (answers != 0)
            part = tl.load(source, mask=wanted & asked, other=0.0, cache_modifier=".cg").to(tl.float32)
            part *= weight
            # An absent slot's weight may be NaN or inf: choose, do not multiply by 0.
            total = tl.where(asked, total + part, total)
    tl.store(y + row * D + columns, total.to(y.dtype.element_ty), mask=(columns < D) & present)
