"""ExpertLink within one process: rows never leave it, the experts are called where they are dispatched.

Legend: T rows, D hidden size, K experts chosen per row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from services.fabric.link import SynchronousLink
from services.fabric.row_counts import ExpertRows

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x_TD, expert_ids_TK, weights_TK) -> y_TD``: all experts of one layer; -1 in the ids is skipped."""


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """A dispatch whose result is already there."""

    y_TD: Tensor


class LocalLink(SynchronousLink):
    """Calls a layer's experts in place and counts the rows each expert took.

    Args:
        experts: layer index -> the layer's experts.
        num_experts: experts per layer, the width of the counts.
    """

    def __init__(self, experts: Mapping[int, Experts], *, num_experts: int) -> None:
        self._experts = dict(experts)
        self._rows = ExpertRows(experts, num_experts)

    def graph_key(self) -> Hashable | None:
        return "local"

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        """Nothing goes anywhere: rows without ids are no expert's and are not counted."""
        del rows
        return nullcontext("local")

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> LocalHandle:
        self._rows.count(layer, expert_ids_TK)
        return LocalHandle(self._experts[layer](x_TD, expert_ids_TK, weights_TK))

    def combine(self, handle: LocalHandle) -> Tensor:
        return handle.y_TD

    def expert_rows(self) -> dict[int, list[int]]:
        """Rows that each expert of each layer has taken since the link was made. Waits for the device."""
        return self._rows.totals()
