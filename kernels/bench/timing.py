"""Microseconds per call: CUDA-graph replays on a GPU, so that launches cost what they cost in a server's decode step.

A call takes a number and uses the copy of its weights with that number, modulo their count. Copies are enough to push
each other out of the L2: a layer of a real model never finds its weights there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch

Call = Callable[[int], object]
Clock = Literal["graph", "events", "host"]

L2_BYTES: Final = 60e6
ROTATION_BYTES: Final = 4 * L2_BYTES
"""What the copies of a layer move together before the first one comes around again."""
MEMORY_SHARE: Final = 0.35
"""Of the GPU's memory for copies of one layer's weights; peers keep packed ones of their own beside them."""
WARM_UP: Final = 3
REPLAYS: Final = 21


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Percentiles over replays, each the mean of a graph's calls. ``clock`` "host" is no GPU at all: never compare."""

    p20: float
    p50: float
    p80: float
    clock: Clock


def copies_for(touched_bytes: float, layer_bytes: float, memory_bytes: float) -> int:
    """Copies of a layer of which one call touches ``touched_bytes``: past the L2, at least 2, and within memory.

    Example: int4 Qwen3-30B, one token: 8 experts of 2.4 MB; 240 MB / 19.5 MB = 13 copies of 311 MB.
    """
    wanted = max(2, math.ceil(ROTATION_BYTES / max(touched_bytes, 1.0)))
    return max(1, min(wanted, int(memory_bytes * MEMORY_SHARE / max(layer_bytes, 1.0))))


def measure(call: Call, *, copies: int = 1, device: str = "cuda", budget_s: float = 0.4, graph: bool = True) -> Timing:
    """Times ``call``. One that cannot be captured (it waits for the device) is timed launch by launch, and so is any
    with ``graph=False`` (autograd: its calls are long enough).
    """
    for number in range(max(WARM_UP, copies) if device != "cpu" else 1):
        call(number)
    if device == "cpu":
        return _summary(_host_samples(call, budget_s), "host")
    torch.cuda.synchronize()
    once_us = _event_us(call, copies)
    calls = _round_up(max(1, min(32, int(20_000 / once_us))), copies)
    captured = _capture(call, calls) if graph else None
    if captured is None:
        return _summary([_event_us(call, copies) for _ in range(_replays(once_us * copies, budget_s))], "events")
    captured.replay()
    replays = _replays(once_us * calls, budget_s)
    return _summary([_between_events(captured.replay) / calls for _ in range(replays)], "graph")


def peak_mib(call: Call) -> float | None:
    """The most that was allocated at once during a call beyond what was before it. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _capture(call: Call, calls: int) -> torch.cuda.CUDAGraph | None:
    """None if the call synchronises."""
    try:
        return _captured(call, calls)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def _captured(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number)
    return graph


def _replays(replay_us: float, budget_s: float) -> int:
    return max(5, min(REPLAYS, int(budget_s * 1e6 / max(replay_us, 1.0))))


def _round_up(count: int, multiple: int) -> int:
    """Whole rotations. Example: 20 calls over 3 copies: 21."""
    return -(-count // multiple) * multiple


def _event_us(call: Call, calls: int) -> float:
    def run() -> None:
        for number in range(calls):
            call(number)

    return _between_events(run) / calls


def _between_events(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)) * 1e3, 1e-3)


def _host_samples(call: Call, budget_s: float) -> list[float]:
    samples: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(samples) < 3 or (len(samples) < REPLAYS and time.perf_counter() < deadline):
        began = time.perf_counter()
        call(len(samples))
        samples.append((time.perf_counter() - began) * 1e6)
    return samples


def _summary(samples: list[float], clock: Clock) -> Timing:
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(p20=cuts[1], p50=cuts[4], p80=cuts[7], clock=clock)
