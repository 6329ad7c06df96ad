"""Local search: moves experts of one layer between bins (shard groups or devices) while that evens out their load.

Legend: W windows of time, E experts, B bins.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Change = tuple[int, int, int]
"""``(bin, expert that leaves or -1, expert that enters or -1)``."""

Estimates = list[tuple[int, float]]
"""``(bin, change of its load)``."""

_LEVELLING = 0.05
"""Weight of the mean square, added to the maximum: it guides the search where several bins share the maximum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Bins of the search. ``room_B``: experts that a bin may hold. ``price_B``: price of loading one more expert, in
    units of max / mean.

    ``replicate``: an expert may be in several bins, its load split evenly. Otherwise no bin is ever emptied.
    """

    capacity_B: Sequence[float]
    room_B: Sequence[int]
    price_B: Sequence[float]
    replicate: bool


_PROGRESS = 1e-4
"""Improvement, in units of max / mean, below which the search ends."""
_TRIED = 192
"""How many changes have their value computed in full in each step, over all windows."""


class Arrangement:
    """Which bins hold which experts of one layer.

    Args:
        loads_WE: load by expert in each window; windows count by their sum.
        held: experts per bin to start from; those in none are placed at once, the heaviest first.
        home: experts per bin that cost nothing to hold; whatever else a bin ends up with has to be loaded.
    """

    def __init__(
        self, loads_WE: Sequence[Sequence[float]], bins: Bins, held: Sequence[set[int]], home: Sequence[set[int]]
    ) -> None:
        unit = sum(map(sum, loads_WE)) / sum(bins.capacity_B)
        self._loads_WE = [[load / unit for load in loads_E] for loads_E in loads_WE]
        self._bins = bins
        self._home = home
        self.held = [set(experts) for experts in held]
        self._holders: list[set[int]] = [set() for _ in loads_WE[0]]
        for number, experts in enumerate(self.held):
            for expert in experts:
                self._holders[expert].add(number)
        self._loads_WB = self._loads()
        self._place(self._missing())

    def climb(self) -> None:
        """Apply the best change of the neighbourhood until none is an improvement."""
        while True:
            here = self._value(self._loads_WB)
            value, changes = min(((self._after(changes), changes) for changes in self._changes()), default=(here, ()))
            if value > here - _PROGRESS:
                return
            self._apply(changes)

    def value(self) -> float:
        """Return the sum that is minimised: max / mean by window, a little mean square, and the price of loading."""
        return self._value(self._loads_WB) + sum(
            price * len(held - home)
            for price, held, home in zip(self._bins.price_B, self.held, self._home, strict=True)
        )

    def _changes(self) -> Iterator[tuple[Change, ...]]:
        """Yield the most promising changes, by window, of the most loaded bin: others do not lower the maximum."""
        for loads_B, loads_E in zip(self._loads_WB, self._loads_WE, strict=True):
            hot = max(
                range(len(loads_B)), key=lambda number: (loads_B[number] / self._bins.capacity_B[number], -number)
            )
            each_E = [load / len(holders) for load, holders in zip(loads_E, self._holders, strict=True)]
            promised = (
                (max(self._peak_load(loads_B, number, change) for number, change in estimates), changes)
                for estimates, changes in self._touching(hot, each_E)
            )
            yield from (changes for _, changes in heapq.nsmallest(_TRIED // len(self._loads_WB), promised))

    def _touching(self, hot: int, each_E: Sequence[float]) -> Iterator[tuple[Estimates, tuple[Change, ...]]]:
        """Yield changes of bin ``hot`` with their estimates. ``each_E``: load of a copy of each expert in a window."""
        for expert in sorted(self.held[hot]):
            for number in range(len(self.held)):
                if number != hot and expert not in self.held[number]:
                    yield from self._between(hot, expert, number, each_E)
            if len(self._holders[expert]) > 1:
                dropped = self._dropped(expert, hot, each_E)
                yield [(hot, -each_E[expert]), *dropped], ((hot, expert, -1),)
                for other in self._absent(hot):
                    change = each_E[other] * self._diluted(other) - each_E[expert]
                    yield [(hot, change), *dropped], ((hot, expert, other),)

    def _between(
        self, hot: int, expert: int, number: int, each_E: Sequence[float]
    ) -> Iterator[tuple[Estimates, tuple[Change, ...]]]:
        """Yield changes where ``expert`` of ``hot`` moves to bin ``number``, is exchanged there, or is copied there."""
        free, replicate = len(self.held[number]) < self._bins.room_B[number], self._bins.replicate
        load, copied = each_E[expert], each_E[expert] * self._diluted(expert)
        if free and (replicate or len(self.held[hot]) > 1):
            yield [(hot, -load), (number, load)], ((hot, expert, -1), (number, -1, expert))
        if free and replicate:
            yield [(hot, copied - load), (number, copied)], ((number, -1, expert),)
        for other in sorted(self.held[number]):
            if other not in self.held[hot]:
                shed = load - each_E[other]
                yield [(hot, -shed), (number, shed)], ((hot, expert, other), (number, other, expert))
            if replicate and len(self._holders[other]) > 1:
                estimates = [(hot, copied - load), (number, copied - each_E[other])]
                yield estimates + self._dropped(other, number, each_E), ((number, other, expert),)

    def _dropped(self, expert: int, number: int, each_E: Sequence[float]) -> Estimates:
        """Return the load that the other holders take over when bin ``number`` drops its copy."""
        others = self._holders[expert] - {number}
        return [(other, each_E[expert] / len(others)) for other in others]

    def _diluted(self, expert: int) -> float:
        """Return the factor on the load of each copy when there is one more."""
        return len(self._holders[expert]) / (len(self._holders[expert]) + 1)

    def _peak_load(self, loads_B: Sequence[float], number: int, change: float) -> float:
        return (loads_B[number] + change) / self._bins.capacity_B[number]

    def _absent(self, number: int) -> list[int]:
        return [expert for expert in range(len(self._holders)) if expert not in self.held[number]]

    def _after(self, changes: tuple[Change, ...]) -> float:
        """Return the value if ``changes`` were applied, less the price of what is loaded already."""
        loads_WB = [loads_B[:] for loads_B in self._loads_WB]
        price = 0.0
        for expert in {expert for change in changes for expert in change[1:] if expert >= 0}:
            holders = self._holders[expert]
            left = {number for number, out, _ in changes if out == expert}
            entered = {number for number, _, into in changes if into == expert}
            after = (holders - left) | entered
            for loads_B, loads_E in zip(loads_WB, self._loads_WE, strict=True):
                _spread(loads_B, holders, -loads_E[expert])
                _spread(loads_B, after, loads_E[expert])
            price += sum(self._price(number, expert) for number in entered)
            price -= sum(self._price(number, expert) for number in left)
        return self._value(loads_WB) + price

    def _apply(self, changes: tuple[Change, ...]) -> None:
        for number, out, into in changes:
            if out >= 0:
                self.held[number].remove(out)
                self._holders[out].remove(number)
            if into >= 0:
                self.held[number].add(into)
                self._holders[into].add(number)
        self._loads_WB = self._loads()

    def _value(self, loads_WB: Sequence[Sequence[float]]) -> float:
        total = 0.0
        for loads_B in loads_WB:
            peak_loads_B = [load / capacity for load, capacity in zip(loads_B, self._bins.capacity_B, strict=True)]
            total += max(peak_loads_B) + _LEVELLING * sum(peak_load * peak_load for peak_load in peak_loads_B) / len(
                peak_loads_B
            )
        return total

    def _price(self, number: int, expert: int) -> float:
        return 0.0 if expert in self._home[number] else self._bins.price_B[number]

    def _loads(self) -> list[list[float]]:
        loads_WB = [[0.0] * len(self.held) for _ in self._loads_WE]
        for loads_B, loads_E in zip(loads_WB, self._loads_WE, strict=True):
            for expert, holders in enumerate(self._holders):
                _spread(loads_B, holders, loads_E[expert])
        return loads_WB

    def _missing(self) -> list[int]:
        missing = [expert for expert, holders in enumerate(self._holders) if not holders]
        return sorted(missing, key=lambda expert: (-self._total(expert), expert))

    def _total(self, expert: int) -> float:
        return sum(loads_E[expert] for loads_E in self._loads_WE)

    def _place(self, experts: list[int]) -> None:
        """Put each expert into the bin with room that is least loaded with it; the last ones into empty bins."""
        for position, expert in enumerate(experts):
            open_bins = [number for number, held in enumerate(self.held) if len(held) < self._bins.room_B[number]]
            if not open_bins:
                open_bins = [self._evict()]
            empty = [number for number in open_bins if not self.held[number]]
            if len(empty) >= len(experts) - position:
                open_bins = empty
            number = min(open_bins, key=lambda number: (self._with(number, expert), len(self.held[number]), number))
            self._apply(((number, -1, expert),))

    def _with(self, number: int, expert: int) -> float:
        load = sum(loads_B[number] for loads_B in self._loads_WB) + self._total(expert)
        return load / self._bins.capacity_B[number]

    def _evict(self) -> int:
        """Drop the copy whose loss raises the load of the others least. Returns its bin."""
        spare = [expert for expert, holders in enumerate(self._holders) if len(holders) > 1]
        expert = min(spare, key=lambda expert: (self._total(expert) / (len(self._holders[expert]) - 1), expert))
        number = max(self._holders[expert])
        self._apply(((number, expert, -1),))
        return number


def _spread(loads_B: list[float], holders: set[int], load: float) -> None:
    for number in holders:
        loads_B[number] += load / len(holders)
