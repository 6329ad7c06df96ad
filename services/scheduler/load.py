"""The experts' load by the seats' counters: totals by seat in, rows per expert out, fading."""

from __future__ import annotations

from collections.abc import Mapping

from services.messages import SeatRows
from services.placement import Load, smoothed
from services.routing import RoutingTable

FADE = 0.3
"""Weight of the newest reading."""


def imbalance(load: Load | None, table: RoutingTable) -> float | None:
    """Return the highest load per seat of a shard group over the mean of the groups that have seats. None: there is no
    load, or no seat."""
    if load is None:
        return None
    per_seat = [
        sum(load[layer][expert] for layer, experts in group.experts.items() for expert in experts) / len(seats)
        for group in table.groups
        if (seats := table.seats_of[group.number])
    ]
    return max(per_seat) * len(per_seat) / sum(per_seat) if any(per_seat) else None


class LoadMeter:
    """Rows per expert from what the seats count, fading over a few readings."""

    def __init__(self) -> None:
        self._counted: dict[int, SeatRows] = {}
        self.load: Load | None = None
        """Unknown until rows were counted."""

    def read(self, rows: Mapping[int, SeatRows], table: RoutingTable) -> None:
        """Take a reading: ``rows`` by seat number, as Redis has them."""
        experts = {group.digest: group.experts for group in table.groups}
        found = {layer: [0.0] * table.num_experts for layer in table.group_of}
        for seat, counted in rows.items():
            for layer, counts in counted.since(self._counted.get(seat)).items():
                for expert, count in zip(experts.get(counted.digest, {}).get(layer, ()), counts, strict=False):
                    found[layer][expert] += count
        first, self._counted = not self._counted, dict(rows)
        if not first and any(map(any, found.values())):
            self.load = smoothed(self.load, found, weight=FADE)
