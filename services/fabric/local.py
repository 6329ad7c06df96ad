"""ExpertLink within one process: rows never leave it, the experts are called where they are dispatched.

Legend: T rows, D hidden size, K experts chosen per row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from services.fabric.link import Experts
from services.fabric.row_counts import CountedLink, ExpertRows


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """A dispatch whose result ``y_TD`` is already computed."""

    y_TD: Tensor


class LocalLink(CountedLink):
    """Calls a layer's experts in place and counts the rows that each expert took.

    Args:
        experts: layer index -> the layer's experts.
        num_experts: experts per layer, the width of the counts.
    """

    def __init__(self, experts: Mapping[int, Experts], *, num_experts: int) -> None:
        super().__init__(ExpertRows(experts, num_experts))
        self._experts = dict(experts)
        self.on_dispatch: Callable[[int, Tensor], None] | None = None
        """Called with each layer and the experts that its rows chose, where somebody looks. CUDA graphs do not."""

    def graph_key(self) -> Hashable | None:
        return "local"

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        """Leave exchanges inside as they are: no row leaves this process, and rows without ids are not counted."""
        del rows
        return nullcontext("local")

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> LocalHandle:
        self._rows.count(layer, expert_ids_TK)
        if self.on_dispatch is not None:
            self.on_dispatch(layer, expert_ids_TK)
        return LocalHandle(self._experts[layer](x_TD, expert_ids_TK, weights_TK))

    def combine(self, handle: LocalHandle) -> Tensor:
        return handle.y_TD
