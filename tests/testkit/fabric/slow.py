"""Experts that take their time. Text of its own, for pods that have nothing else of these tests
(fabric/slow_group.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from services.model.experts import ExpertShard

Compute = Callable[[int, "Tensor", "Tensor", "Tensor"], "Tensor"]


def slow(compute: Compute, *, row_s: float = 0.0, call_s: float = 0.0) -> Compute:
    """``compute``, taking ``call_s`` and ``row_s`` for each row at least, as a slower machine or network would."""

    def wait_and_compute(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        until = time.perf_counter() + call_s + row_s * len(x_TD)
        y_TD = compute(layer, x_TD, ids_TK, weights_TK)
        time.sleep(max(0.0, until - time.perf_counter()))
        return y_TD

    return wait_and_compute


def slow_shards(shards: type[ExpertShard], *, row_s: float = 0.0, call_s: float = 0.0) -> None:
    """Makes all of this process slow."""
    fast = shards.forward

    def forward(shard: ExpertShard, *call: int | Tensor) -> Tensor:
        return slow(fast.__get__(shard), row_s=row_s, call_s=call_s)(*call)

    shards.forward = forward
