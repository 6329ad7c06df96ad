"""A case and a provider in, a row of results out; failures are rows too."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch
from torch import Tensor

from bench import draws
from bench.bank import Bank, poison
from bench.case import Case, activation_dtype, deviation, make
from bench.precompile import Compilers, Task
from bench.providers import PROVIDERS, ROUNDED, Prepare, Unsupported
from bench.results import Row
from bench.shapes import LayerShape
from bench.timing import Call, Timing, measure

WRONG: Final = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 2e-2}
"""Deviation from the float32 reference above which a timing does not count, by the dtype of the activations."""
WRONG_ROUNDED: Final = 5e-2
"""The same where rows are rounded to FP8 before both products: each loses 2.6 % of its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """``budget_s`` per case and provider, once it is compiled. ``scale`` divides widths in suites."""

    device: str = "cuda"
    budget_s: float = 0.4
    seed: int = 0
    scale: int = 1
    tokens: int | None = None
    suite: str = "run"
    compilers: Compilers | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def measure_shape(
    ops: Sequence[str],
    shape: LayerShape,
    rows: Iterable[int],
    dtypes: Sequence[str],
    providers: Sequence[str],
    settings: Settings,
) -> Iterator[Row]:
    """Everything about one shape; its weights are made once and dropped at the end."""
    rows = list(rows)
    if settings.compilers:
        cases = product(ops, rows, dtypes, providers)
        settings.compilers.run(
            [
                Task(op=op, shape=shape, rows=count, dtype=dtype, provider=provider, device=settings.device)
                for op, count, dtype, provider in cases
            ]
        )
    for kind in dict.fromkeys(activation_dtype(dtype) for dtype in dtypes):
        bank = Bank(shape, settings.device, activation_dtype=kind, seed=settings.seed)
        wanted = [dtype for dtype in dtypes if activation_dtype(dtype) == kind]
        for count in rows:
            draw = draws.uniform(count, shape.E, shape.k, seed=settings.seed, device=settings.device)
            for op in ops:
                for dtype in wanted:
                    case = make(op, shape, count, dtype, bank, draw)
                    yield from measure_case(case, {name: PROVIDERS[name] for name in providers}, settings)
        del bank
        release(settings)


def measure_case(case: Case, providers: Mapping[str, Prepare], settings: Settings) -> Iterator[Row]:
    """One row per provider, in order."""
    for name, prepare in providers.items():
        yield _measure(case, name, prepare, settings)
        release(settings)


class Kept:
    """A call that also keeps its last output on the weights of copy 0; in a graph that is what the last replay left."""

    def __init__(self, call: Call, copies: int) -> None:
        self.kept: object = None
        self._call = call
        self._copies = copies

    def __call__(self, number: int) -> object:
        output = self._call(number)
        if number % self._copies == 0:
            self.kept = output
        return output


def release(settings: Settings) -> None:
    """Gives freed blocks back, so that one provider's leftovers are not the next one's shortage."""
    if settings.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def _measure(case: Case, name: str, prepare: Prepare, settings: Settings) -> Row:
    off: float | None = None
    timing: Timing | None = None
    error = ""
    try:
        with torch.no_grad():
            call = Kept(prepare(case), case.copies)
            poison(case.device)
            call(0)
            off = _deviation(case, call.kept)
            timing = measure(call, copies=case.copies, device=case.device, budget_s=settings.budget_s)
            # Again on what the last replay left: launches that overlap may be right only one by one.
            error = _wrong(case, name, off) or _wrong(case, name, _deviation(case, call.kept))
    except Unsupported as unsupported:
        error = f"unsupported: {unsupported}"
    except Exception as failure:  # noqa: BLE001 - a peer that fails is a result, not the end of the run
        error = f"{type(failure).__name__}: {failure}"[:300]
    return Row(
        suite=settings.suite,
        op=case.op,
        provider=name,
        shape=case.shape.name,
        rows=case.rows,
        dtype=case.dtype,
        floor_us=case.floor_us,
        timing=None if error else timing,
        deviation=off,
        error=error,
    )


def _deviation(case: Case, output: object) -> float | None:
    """None where there is no reference."""
    return deviation(case, output) if case.op == "fused_moe" and isinstance(output, Tensor) else None


def _wrong(case: Case, provider: str, off: float | None) -> str:
    rounded = case.dtype == "fp8" and provider in ROUNDED
    limit = WRONG_ROUNDED if rounded else WRONG[activation_dtype(case.dtype)]
    return "" if off is None or off <= limit else f"wrong: deviates by {off:.3g} from float32, allowed {limit:g}"
