"""An ExpertLink that knows how long its user waited in it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from torch import Tensor

from services.fabric.link import ExpertLink

HandleT = TypeVar("HandleT")


class TimedLink(Generic[HandleT]):
    """Passes everything on to ``link``. Not thread-safe."""

    def __init__(self, link: ExpertLink[HandleT]) -> None:
        self._link = link
        self.waited_s = 0.0
        """In combine, since the start, by the host's clock."""

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        self._link.begin_step(step, rows)

    def graph_key(self) -> Hashable | None:
        return self._link.graph_key()

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        return self._link.capture_context(rows)

    def finish_step(self) -> bool:
        return self._link.finish_step()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        return self._link.dispatch(layer, x_TD, expert_ids_TK, weights_TK)

    def combine(self, handle: HandleT) -> Tensor:
        began = time.perf_counter()
        try:
            return self._link.combine(handle)
        finally:
            self.waited_s += time.perf_counter() - began
