"""A timing that counts only where the output is right, for suites whose cases know what it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from bench.bank import poison
from bench.measuring import WRONG, Settings
from bench.results import Row
from bench.suites.modules import timed
from bench.timing import Call


class Checkable(Protocol):
    device: str

    @property
    def copies(self) -> int: ...

    def deviation(self, out: Tensor, /) -> float:
        """Norm of the difference to float32 over its norm, NaN if anything is NaN."""
        ...


CaseT = TypeVar("CaseT", bound=Checkable)


def checked(case: CaseT, build: Callable[[CaseT], Call], row: Row, settings: Settings) -> Row:
    """``row`` with the time of what ``build`` makes of the case, or with the error that its output is wrong."""
    off: list[float] = []

    def prepared() -> Call:
        call = build(case)
        poison(case.device)
        out = call(0)
        assert isinstance(out, Tensor)
        off.append(case.deviation(out))
        if not off[0] <= WRONG[row.dtype]:
            raise ValueError(f"wrong: deviates by {off[0]:.3g} from float32, allowed {WRONG[row.dtype]:g}")
        return call

    with torch.no_grad():
        done = timed(prepared, row, settings, graph=True, copies=case.copies)
    return replace(done, deviation=off[0] if off else None)
