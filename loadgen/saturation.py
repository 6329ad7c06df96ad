"""When a server takes in less than comes: the number of requests under way grows as long as one waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SETTLED_S, EVERY_S = 5.0, 0.25
_LEAST = 16
"""Requests under way below which nothing is said."""
_SHARE = 0.05
"""Of the arrivals that stay, above which a server is over-saturated."""


@dataclass(slots=True)
class Saturation:
    """Looks at the number of requests under way, each ``EVERY_S``, in a load of ``rate`` arrivals a second."""

    rate: float
    _samples: list[tuple[float, int]] = field(default_factory=list)

    def add(self, moment: float, in_flight: int) -> bool:
        """Returns whether the backlog grows, by what was seen until ``moment``."""
        self._samples.append((moment, in_flight))
        if moment < SETTLED_S or in_flight < _LEAST:
            return False
        late = [sample for sample in self._samples if sample[0] >= moment / 2]
        slope, error = _slope(late)
        return slope - 2 * error > _SHARE * self.rate and in_flight > 1.5 * late[0][1]


def _slope(samples: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Returns the slope of a line through ``samples``, and its standard error."""
    count = len(samples)
    if count < 4:
        return 0.0, math.inf
    mean_x, mean_y = sum(x for x, _ in samples) / count, sum(y for _, y in samples) / count
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in samples)
    return slope, math.sqrt(left / (count - 2) / spread)
