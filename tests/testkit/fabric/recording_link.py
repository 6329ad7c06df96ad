"""Links that record their calls: for tests of what overlaps with the exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from services.fabric.link import ExpertLink, SynchronousLink


@dataclass
class RecordingLink(SynchronousLink):
    """Passes on to ``link`` and notes ``(what, layer, rows)``. ``fail``, where set, is raised by that combine."""

    link: ExpertLink[Any]
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    fail: tuple[int, Exception] | None = None
    in_flight: int = 0
    max_in_flight: int = 0

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> tuple[int, int, Any]:
        self.calls.append(("dispatch", layer, len(x_TD)))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        return layer, len(x_TD), self.link.dispatch(layer, x_TD, expert_ids_TK, weights_TK)

    def combine(self, handle: tuple[int, int, Any]) -> Tensor:
        layer, rows, inner = handle
        self.calls.append(("combine", layer, rows))
        self.in_flight -= 1
        y_TD = self.link.combine(inner)
        if self.fail is not None and sum(what == "combine" for what, *_ in self.calls) == self.fail[0]:
            raise self.fail[1]
        return y_TD
