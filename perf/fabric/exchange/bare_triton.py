"""The least that a round trip needs: bytes into the peer's memory, a flag, a wait for the peer's. And a time stamp."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["at"])
def stamp(stamps, at):
    """``stamps[at]`` = now, in nanoseconds."""
    tl.store(stamps + at, globaltimer())


@triton.jit
def put(
    source, target, N: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, BACK: tl.constexpr, flags, counter
):
    """N 16-bit words to the address ``target[0]``, then each program's flag at ``flags[0]`` = counter[0] - BACK."""
    pid = tl.program_id(0)
    there = tl.multiple_of(tl.load(target).to(tl.pointer_type(tl.bfloat16)), 16)
    for start in range(pid * BLOCK, N, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(there + at, tl.load(source + at, mask=at < N), mask=at < N)
    tl.debug_barrier()
    flag = tl.load(flags).to(tl.pointer_type(tl.int64)) + pid
    tl.atomic_xchg(flag, tl.load(counter) - BACK, sem="release", scope="sys")


@triton.jit
def wait(flags, counter, failed, PROGRAMS: tl.constexpr, deadline_ns):
    """Waits until all flags are at counter[0]; then counter[0] += 1. At the deadline ``failed[0]`` = 1."""
    want = tl.load(counter)
    began = globaltimer()
    least = tl.zeros((), tl.int64)
    stop = tl.atomic_or(failed, 0)
    tries = 0
    while (least < want) & (stop == 0):
        seen = tl.atomic_add(flags + tl.arange(0, PROGRAMS), 0, sem="acquire", scope="sys")
        least = tl.min(seen, axis=0)
        tries += 1
        if tries % 16 == 0:
            late = globaltimer() - began > deadline_ns
            stop = tl.atomic_or(failed, tl.where(late, 1, 0).to(tl.int64))
    tl.debug_barrier()
    tl.store(counter, want + 1)
