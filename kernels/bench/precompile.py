"""Compiles kernels in many processes before one process measures them: each task is a call that runs once.

Triton keeps what it compiled on disk, by source and arguments, so the measuring process finds it there. Only the time
of a run depends on this.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from bench import draws
from bench.bank import Bank
from bench.case import activation_dtype, make
from bench.providers import PROVIDERS
from bench.shapes import LayerShape

COMPILED: Final = ("ours", "ours_weight_only", "vllm", "vllm_fp8", "vllm_mxfp4")
"""Providers whose kernels are compiled as they are first called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One call, as :mod:`bench.measuring` will make it."""

    op: str
    shape: LayerShape
    rows: int
    dtype: str
    provider: str
    device: str


class Compilers:
    """A pool of processes; each builds a layer for its share of the tasks and drops it afterwards."""

    def __init__(self, pool: multiprocessing.pool.Pool, jobs: int) -> None:
        self._pool = pool
        self._jobs = jobs

    def run(self, tasks: Sequence[Task]) -> None:
        tasks = [task for task in tasks if task.provider in COMPILED]
        shares = [tasks[start :: self._jobs] for start in range(min(self._jobs, len(tasks)))]
        self._pool.map(run_once, shares, chunksize=1)


@contextmanager
def compilers(jobs: int) -> Iterator[Compilers | None]:
    """None if ``jobs`` is below 2."""
    if jobs < 2:
        yield None
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield Compilers(pool, jobs)


def run_once(tasks: Sequence[Task]) -> None:
    """Failures are left to the measuring process, which reports them."""
    bank: Bank | None = None
    for task in tasks:
        kind = activation_dtype(task.dtype)
        if bank is None or (bank.shape, bank.activation_dtype) != (task.shape, kind):
            bank = Bank(task.shape, task.device, activation_dtype=kind)
        try:
            draw = draws.uniform(task.rows, task.shape.E, task.shape.k, device=task.device)
            case = replace(make(task.op, task.shape, task.rows, task.dtype, bank, draw), copies=1)
            with torch.no_grad():
                PROVIDERS[task.provider](case)(0)
        except Exception:  # noqa: BLE001 - it will fail again where it is measured
            pass
    del bank
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
