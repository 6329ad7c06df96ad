"""What the seats' counters say of the experts' load. In: totals by seat. Out: rows per expert, fading."""

from __future__ import annotations

from collections.abc import Mapping

from services.messages import SeatRows
from services.placement import Load, smoothed
from services.routing import RoutingTable

FADE = 0.3
"""Weight of the newest reading."""


class LoadMeter:
    """Rows per expert from what the seats count, fading over a few readings."""

    def __init__(self) -> None:
        self._counted: dict[int, SeatRows] = {}
        self._load: Load | None = None

    @property
    def load(self) -> Load | None:
        """None until rows were counted."""
        return self._load

    def read(self, rows: Mapping[int, SeatRows], table: RoutingTable) -> None:
        """``rows`` by seat number, as Redis has them."""
        experts = {group.digest: group.experts for group in table.groups}
        found = {layer: [0.0] * table.num_experts for layer in table.group_of}
        for seat, counted in rows.items():
            for layer, counts in counted.since(self._counted.get(seat)).items():
                for expert, count in zip(experts.get(counted.digest, {}).get(layer, ()), counts, strict=False):
                    found[layer][expert] += count
        first, self._counted = not self._counted, dict(rows)
        if not first and any(map(any, found.values())):
            self._load = smoothed(self._load, found, weight=FADE)
