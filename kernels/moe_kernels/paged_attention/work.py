"""A work list where kernels read it: a tensor of fixed size on the device, filled again for each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.paged_attention.planner import Planner, Room
from moe_kernels.paged_attention.tiling import Tiling


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """``words_W`` int32 are a step's, by the planner that ``room``, ``tiling`` and ``window`` are of. Launches depend
    on the latter alone, so a CUDA graph can hold them while the words change: :meth:`fill`."""

    words_W: Tensor
    room: Room
    tiling: Tiling
    window: int | None

    @classmethod
    def of(cls, planner: Planner, words_W: Tensor) -> Work:
        """The words that ``planner`` made, on the device of the queries."""
        return cls(words_W=words_W, room=planner.room, tiling=planner.tiling, window=planner.window)

    @classmethod
    def empty(cls, planner: Planner, device: torch.device | str) -> Work:
        """No items at all: rows come out as they were in memory until it is filled."""
        return cls.of(planner, torch.zeros(planner.room.words, dtype=torch.int32, device=device))

    def fill(self, words_W: Tensor) -> Work:
        """Take over the words of a step, from any device (pinned memory: without waiting). Returns itself."""
        self.words_W.copy_(words_W, non_blocking=True)
        return self
