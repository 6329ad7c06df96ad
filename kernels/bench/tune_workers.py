"""The processes that compile a tuner's candidates, by running each once on a layer of their own.

Triton keeps what they compiled on disk, where the tuner finds it when it times the candidate.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from bench import draws
from bench.bank import Bank
from bench.candidates import Tiles
from bench.case import Case, activation_dtype, make
from bench.floors import expert_bytes
from bench.providers.ours import prepare_ours
from bench.shapes import LayerShape
from moe_kernels import tiles as table

POOL_MEMORY_SHARE: Final = 0.4
"""Of the GPU's memory, for the compilers' copies of the layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one compiler process builds its layer from."""

    shape: LayerShape
    dtype: str
    device: str


def make_case(work: Work, bank: Bank, rows: int) -> Case:
    draw = draws.uniform(rows, work.shape.E, work.shape.k, device=work.device)
    return make("fused_moe", work.shape, rows, work.dtype, bank, draw)


@contextmanager
def compilers(work: Work, jobs: int) -> Iterator[multiprocessing.pool.Pool | None]:
    """A pool of processes that run candidates once; None where there is nothing to compile."""
    if work.device == "cpu":
        yield None
        return
    layer_bytes = work.shape.E * (expert_bytes(work.shape, work.dtype) + expert_bytes(work.shape, "bf16"))
    room = torch.cuda.get_device_properties(work.device).total_memory * POOL_MEMORY_SHARE
    count = max(1, min(jobs, int(room / layer_bytes)))
    with multiprocessing.get_context("spawn").Pool(count, initializer=_start, initargs=(work,)) as pool:
        yield pool


_worker: dict[str, Any] = {}
"""Of a compiler process: its work and its bank."""


def _start(work: Work) -> None:
    _worker["work"] = work
    _worker["bank"] = Bank(work.shape, work.device, activation_dtype=activation_dtype(work.dtype))


def run_once(rows: int, choices: Mapping[str, Tiles]) -> str:
    """Runs the call once with these tiles. "" or what went wrong."""
    try:
        with table.overridden(choices), torch.no_grad():
            case = make_case(_worker["work"], _worker["bank"], rows)
            prepare_ours(replace(case, copies=1))(0)
            torch.cuda.synchronize()
    except Exception as failure:  # noqa: BLE001 - out of shared memory, mostly
        return f"{type(failure).__name__}: {str(failure)[:200]}"
    return ""
