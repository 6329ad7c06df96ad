"""How far a run is, in tokens, in; its learning rate out. Plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["wsd", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Warm-up, then "wsd" (stable, and linear decay over the last ``decay`` of the run) or "cosine".

    ``warmup`` and ``total`` are tokens; ``floor`` is the last rate as a share of ``peak``. With "wsd" a run can be
    made longer while it is stable.

    Example: peak 1, floor 0, warmup 10, total 100, decay 0.2: 0.5 at 5, 1 from 10 to 80, 0.5 at 90, 0 at 100.
    """

    kind: ScheduleKind = "wsd"
    peak: float
    floor: float = 0.1
    warmup: int
    total: int
    decay: float = 0.2

    def rate(self, tokens: int) -> float:
        if tokens < self.warmup:
            return self.peak * tokens / self.warmup
        if self.kind == "cosine":
            done = min(1.0, (tokens - self.warmup) / max(1, self.total - self.warmup))
            share = (1 + math.cos(math.pi * done)) / 2
        else:
            share = min(1.0, max(0.0, (self.total - tokens) / max(1.0, self.decay * self.total)))
        return self.peak * (self.floor + (1 - self.floor) * share)
