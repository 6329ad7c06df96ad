"""Measured load, and the peak load of a placement. Torch-free.

Legend: W windows of time, E experts, B bins (shard groups or devices).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from services.errors import ConfigError

Load = Mapping[int, Sequence[float]]
"""Layer -> rows per second (or any other unit) by expert id."""


def checked_load(load: Load) -> dict[int, list[float]]:
    """Return a copy, layers ascending; a layer that took no rows counts as evenly loaded.

    Raises:
        ConfigError: there is no layer, layers differ in their number of experts, or a load is negative or not finite.
    """
    widths = {len(row) for row in load.values()}
    if len(widths) != 1 or widths == {0}:
        raise ConfigError("A load needs layers, all with the same experts.", hint="Give one number per expert of each.")
    for layer, row in load.items():
        if not all(math.isfinite(rows) and rows >= 0 for rows in row):
            raise ConfigError(f"A load of layer {layer} is negative or not finite.", hint="Measure it again.")
    return {layer: [float(rows) for rows in load[layer]] if any(load[layer]) else [1.0] * len(load[layer])
            for layer in sorted(load)}  # fmt: skip


def smoothed(before: Load | None, measured: Load, *, weight: float = 0.5) -> dict[int, list[float]]:
    """Return the exponentially weighted mean: ``weight`` x ``measured`` + the rest x ``before``, if there is any."""
    if before is None:
        return {layer: list(row) for layer, row in measured.items()}
    return {
        layer: [weight * new + (1 - weight) * old for old, new in zip(before[layer], row, strict=True)]
        for layer, row in measured.items()
    }


def peak_load(loads_LB: Sequence[Sequence[float]], capacity_B: Sequence[float]) -> float:
    """Return the sum over the layers of the highest load per unit of capacity; inf where load meets no capacity.

    Layers run one after the other and each waits for its slowest bin, so a step's time is proportional to this.
    """
    return sum(max(map(per_capacity, loads_B, capacity_B)) for loads_B in loads_LB)


def even_peak_load(load: Load, capacity_B: Sequence[float]) -> float:
    """Return :func:`peak_load` if the load of each layer were split perfectly; 0 without load."""
    return sum(map(sum, load.values())) / sum(capacity_B)


def per_capacity(load: float, capacity: float) -> float:
    """Return the load per unit of capacity; inf without capacity."""
    return load / capacity if capacity else math.inf
