"""Memory that goes back to the machine: how often it is asked for, and that it goes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
import weakref

import pytest
from testkit.waiting import LIMIT_S, eventually

from services.gateway import memory
from services.gateway.memory import MemoryGiver, held_bytes

MIB = 1 << 20


class _Process:
    """Holds so many bytes, of which ``live`` are in use."""

    def __init__(self) -> None:
        self.held = self.live = 100
        self.trims = 0
        self.giver = MemoryGiver(held=lambda: self.held, trim=self.trim)

    def trim(self) -> None:
        self.held, self.trims = self.live, self.trims + 1


@pytest.fixture
def process() -> _Process:
    return _Process()


def test_what_is_free_goes_back_also_after_a_look_at_the_peak(process: _Process) -> None:
    process.held = process.live = 400
    process.giver.look()
    process.live = 120
    assert process.giver.look() == 5
    assert process.held == 120


def test_within_a_tenth_of_its_least_it_is_left_alone(process: _Process) -> None:
    process.held = 110
    assert process.giver.look() == 5
    assert process.trims == 0
    process.held = process.live = 90
    process.giver.look()
    process.held = 100
    process.giver.look()
    assert process.trims == 1


def test_what_is_in_use_is_asked_for_ever_less_often(process: _Process) -> None:
    process.held = process.live = 400
    assert [process.giver.look() for _ in range(4)] == [10, 20, 30, 30]
    process.live = 300
    assert process.giver.look() == 5


def test_only_what_has_stopped_growing_may_be_free(process: _Process) -> None:
    found = []
    for held in (100, 400, 500, 500, 480, 490, 105):
        process.held = process.live = held
        found.append(process.giver.may_have_free)
        process.giver.look()
    assert found == [False, False, False, True, True, True, False]


def test_what_never_stops_growing_is_looked_through_now_and_then(process: _Process) -> None:
    """It may be garbage that grows."""
    found = []
    for _ in range(16):
        process.held = process.live = int(1.1 * process.held) + 1
        found.append(process.giver.may_have_free)
        process.giver.look()
    assert found == [number in (6, 13) for number in range(16)]


def test_a_look_that_sees_nothing_changes_nothing(process: _Process) -> None:
    process.held = 0
    assert process.giver.look() == 5
    process.held = 105
    process.giver.look()
    assert process.trims == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library cannot be asked")
async def test_holes_in_the_heap_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    base = held_bytes() - 50 * MIB
    monkeypatch.setattr(memory, "held_bytes", lambda: held_bytes() - base)  # whatever else this process has
    monkeypatch.setattr(memory, "_LOOK_S", 0.05)
    giving = asyncio.create_task(memory.give_back_memory())
    await asyncio.sleep(0.01)
    pieces = [libc.malloc(8000) for _ in range(20_000)]  # each below what the library maps by itself
    for piece in pieces:
        ctypes.memset(piece, 1, 8000)
    for piece in pieces[:-1]:  # the last one keeps the heap's end where it is
        libc.free(piece)
    async with asyncio.timeout(LIMIT_S):
        while held_bytes() - base > 100 * MIB:
            await asyncio.sleep(0.02)
    libc.free(pieces[-1])
    giving.cancel()
    await asyncio.wait({giving})


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library cannot be asked")
async def test_garbage_goes_where_more_is_held_and_is_left_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 100 * MIB
    monkeypatch.setattr(memory, "held_bytes", lambda: held)
    monkeypatch.setattr(memory, "_LOOK_S", 0.01)
    gc.disable()
    giving = asyncio.create_task(memory.give_back_memory())
    try:
        knot = _Process()
        knot.itself = knot  # type: ignore[attr-defined]
        garbage = weakref.ref(knot)
        del knot
        await asyncio.sleep(0.1)
        assert garbage() is not None
        held = 200 * MIB
        await eventually(lambda: garbage() is None)
    finally:
        gc.enable()
        giving.cancel()
        await asyncio.wait({giving})


def test_a_crowd_of_objects_is_not_looked_through_while_it_comes() -> None:
    """In a process of its own, for what is frozen stays so."""
    code = """
import gc
from services.gateway.memory import collect_seldom
collect_seldom()
before = gc.get_stats()[2]["collections"]
crowd = [[number] for number in range(300_000)]
print(gc.get_stats()[2]["collections"] - before, gc.get_freeze_count() > 0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0", "True"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library cannot be asked")
def test_what_a_thread_has_used_goes_back() -> None:
    code = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
from services.gateway.memory import held_bytes, keep_one_heap
keep_one_heap()
bytearray(30 << 20)  # the first large piece: from now on smaller ones are mapped by themselves no more
pool = ThreadPoolExecutor(1)
before = held_bytes()
pool.submit(lambda: [bytearray(b"x" * 100_000) for _ in range(400)] and None).result()
ctypes.CDLL(None).malloc_trim(0)
print(held_bytes() - before)
pool.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 10 * MIB
