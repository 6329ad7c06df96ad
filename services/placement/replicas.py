"""Assigns seats of unequal capacity to shard groups: replicas go where they help most.

Legend: L layers, G groups, S seats.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from services.errors import ConfigError, NotReady
from services.placement.imbalance import PeakLoads


def assign_seats(
    loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], current_S: Sequence[int | None] | None = None
) -> list[int]:
    """Return the group (index into ``loads_LG``'s columns) of each seat; every group has at least one seat.

    Seats that have a group in ``current_S`` stay there, unless another group would have none. The others, the strongest
    first, go where they lower the maximum load per unit of capacity most. Without ``current_S`` moves and exchanges
    follow until none lowers it further; :func:`next_move` finds them one by one where seats have groups already.

    Raises:
        NotReady: there are fewer seats than groups. A seat cannot serve two groups: merge groups instead, as
            :func:`replan` does where the memory of a seat allows.
        ConfigError: a capacity is not above 0.
    """
    groups = len(loads_LG[0])
    if len(capacity_S) < groups:
        raise NotReady(
            f"{len(capacity_S)} expert workers are too few for {groups} shard groups.",
            hint="Start more expert workers, or split the experts into fewer groups.",
        )
    if min(capacity_S) <= 0:
        raise ConfigError("A seat's capacity is not above 0.", hint="Give its speed against the others, 1 if alike.")
    group_S: list[int | None] = [None] * len(capacity_S) if current_S is None else list(current_S)
    _cover(loads_LG, capacity_S, group_S)
    peak_loads = PeakLoads(loads_LG, capacities(group_S, capacity_S, groups))
    total_G = _totals(loads_LG)
    for seat in sorted(_unassigned(group_S), key=lambda seat: (-capacity_S[seat], seat)):
        group = group_S[seat] = _best_group(peak_loads, total_G, capacity_S[seat])
        peak_loads.add(group, capacity_S[seat])
    assigned = [group for group in group_S if group is not None]
    return _improved(loads_LG, capacity_S, assigned) if current_S is None else assigned


def next_move(
    loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: Sequence[int]
) -> list[int] | None:
    """Return ``group_S`` after the move that lowers the peak load most. None: none does and leaves each group a seat.

    Seats of one group with the same capacity are equal, so the work grows with groups, not with seats.
    """
    peak_loads = PeakLoads(loads_LG, capacities(group_S, capacity_S, len(loads_LG[0])))
    held_G, targets, capacity_G = Counter(group_S), sorted(peak_loads.deciding()), peak_loads.capacity_G
    moves = [
        (
            peak_loads.after({own: capacity_G[own] - size, group: capacity_G[group] + size}),
            {seats[0 if group < own else -1]: group},
        )
        for (own, size), seats in _alike(capacity_S, group_S).items()
        if held_G[own] > 1
        for group in targets
        if group != own
    ]
    return _best(peak_loads.value, group_S, moves)


def capacities(group_S: Sequence[int | None], capacity_S: Sequence[float], groups: int) -> list[float]:
    """Return ``[G]``: the total capacity of each group's seats."""
    total_G = [0.0] * groups
    for group, capacity in zip(group_S, capacity_S, strict=True):
        if group is not None:
            total_G[group] += capacity
    return total_G


def _improved(loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: list[int]) -> list[int]:
    while True:
        better = next_move(loads_LG, capacity_S, group_S) or _next_exchange(loads_LG, capacity_S, group_S)
        if better is None:
            return group_S
        group_S = better


def _next_exchange(
    loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: Sequence[int]
) -> list[int] | None:
    """Return ``group_S`` after the exchange of two seats that lowers the peak load most. None: no exchange does."""
    peak_loads = PeakLoads(loads_LG, capacities(group_S, capacity_S, len(loads_LG[0])))
    capacity_G = peak_loads.capacity_G
    kinds = [(group, size, seats[0]) for (group, size), seats in _alike(capacity_S, group_S).items()]
    exchanges = [
        (
            peak_loads.after({first: capacity_G[first] - less + more, second: capacity_G[second] - more + less}),
            {one: second, other: first},
        )
        for (first, less, one), (second, more, other) in itertools.combinations(kinds, 2)
        if first != second and less != more
    ]
    return _best(peak_loads.value, group_S, exchanges)


def _alike(capacity_S: Sequence[float], group_S: Sequence[int]) -> dict[tuple[int, float], list[int]]:
    """Return seats, ascending, by group and capacity."""
    found: dict[tuple[int, float], list[int]] = {}
    for seat, kind in enumerate(zip(group_S, capacity_S, strict=True)):
        found.setdefault(kind, []).append(seat)
    return found


def _best(here: float, group_S: Sequence[int], changes: list[tuple[float, dict[int, int]]]) -> list[int] | None:
    """Return ``group_S`` after the change (seat -> group) with the least peak load, if that is below ``here``."""
    value = min((value for value, _ in changes), default=here)
    if value >= here * (1 - 1e-9):
        return None
    return min(_changed(group_S, change) for found, change in changes if found == value)


def _changed(group_S: Sequence[int], change: Mapping[int, int]) -> list[int]:
    return [change.get(seat, group) for seat, group in enumerate(group_S)]


def _cover(loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: list[int | None]) -> None:
    """Give every group without seats one: the strongest free seat to the most loaded group. Where no seat is free, a
    group with several gives one."""
    total_G = _totals(loads_LG)
    empty = [group for group in range(len(total_G)) if group not in group_S]
    for group in sorted(empty, key=lambda group: (-total_G[group], group)):
        free = _unassigned(group_S) or _spare(total_G, capacity_S, group_S)
        group_S[min(free, key=lambda seat: (-capacity_S[seat], seat))] = group


def _spare(total_G: Sequence[float], capacity_S: Sequence[float], group_S: Sequence[int | None]) -> list[int]:
    """Return the seats of the group of several seats that has the least load for its capacity."""
    capacity_G = capacities(group_S, capacity_S, len(total_G))
    several = [group for group in range(len(total_G)) if group_S.count(group) > 1]
    source = min(several, key=lambda group: (total_G[group] / capacity_G[group], group))
    return [seat for seat, group in enumerate(group_S) if group == source]


def _best_group(peak_loads: PeakLoads, total_G: Sequence[float], capacity: float) -> int:
    """Return the group where a seat lowers the peak load most; of equals, the one loaded most overall."""
    capacity_G, deciding, here = peak_loads.capacity_G, peak_loads.deciding(), peak_loads.value

    def merit(group: int) -> tuple[float, float, int]:
        value = peak_loads.after({group: capacity_G[group] + capacity}) if group in deciding else here
        return value, -total_G[group] / capacity_G[group], group

    return min(range(len(total_G)), key=merit)


def _totals(loads_LG: Sequence[Sequence[float]]) -> list[float]:
    return [sum(loads_L) for loads_L in zip(*loads_LG, strict=True)]


def _unassigned(group_S: Sequence[int | None]) -> list[int]:
    return [seat for seat, group in enumerate(group_S) if group is None]
