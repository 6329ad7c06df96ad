"""How many and which seats each shard group has: replicas by marginal benefit, seats of unequal capacity.

Legend: L layers, G groups, S seats.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.errors import ConfigError, NotReady
from services.fabric.placement.load import strain


def assign_seats(
    loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], current_S: Sequence[int | None] | None = None
) -> list[int]:
    """The group (index into ``loads_LG``'s columns) of each seat; every group has at least one.

    Seats that ``current_S`` gives a group stay there, but where a group would have none. The others, the strongest
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
            f"{groups} shard groups have only {len(capacity_S)} expert workers.",
            hint="Start more expert workers, or split the experts into fewer groups.",
        )
    if min(capacity_S) <= 0:
        raise ConfigError("A seat's capacity is not above 0.", hint="Give its speed against the others, 1 if alike.")
    group_S: list[int | None] = [None] * len(capacity_S) if current_S is None else list(current_S)
    _cover(loads_LG, capacity_S, group_S)
    for seat in sorted(_unassigned(group_S), key=lambda seat: (-capacity_S[seat], seat)):
        group_S[seat] = _best_group(loads_LG, capacity_S, group_S, seat)
    assigned = [group for group in group_S if group is not None]
    return _improved(loads_LG, capacity_S, assigned) if current_S is None else assigned


def next_move(
    loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: Sequence[int]
) -> list[int] | None:
    """``group_S`` after the one move that lowers the strain most; None if none does. Leaves no group without a seat."""
    moves = [
        [*group_S[:seat], group, *group_S[seat + 1 :]]
        for seat, own in enumerate(group_S)
        if group_S.count(own) > 1
        for group in range(len(loads_LG[0]))
        if group != own
    ]
    return _best(loads_LG, capacity_S, group_S, moves)


def capacities(group_S: Sequence[int | None], capacity_S: Sequence[float], groups: int) -> list[float]:
    """``[G]``: capacity of each group's seats together."""
    total_G = [0.0] * groups
    for group, capacity in zip(group_S, capacity_S, strict=True):
        if group is not None:
            total_G[group] += capacity
    return total_G


def _improved(loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: list[int]) -> list[int]:
    while True:
        better = next_move(loads_LG, capacity_S, group_S) or _best(
            loads_LG, capacity_S, group_S, _exchanges(capacity_S, group_S)
        )
        if better is None:
            return group_S
        group_S = better


def _exchanges(capacity_S: Sequence[float], group_S: Sequence[int]) -> list[list[int]]:
    found = []
    for first, group in enumerate(group_S):
        for second in range(first + 1, len(group_S)):
            if group_S[second] != group and capacity_S[first] != capacity_S[second]:
                changed = list(group_S)
                changed[first], changed[second] = group_S[second], group
                found.append(changed)
    return found


def _best(
    loads_LG: Sequence[Sequence[float]],
    capacity_S: Sequence[float],
    group_S: Sequence[int],
    candidates: list[list[int]],
) -> list[int] | None:
    """The candidate with the least strain, if it is below that of ``group_S``."""
    groups = len(loads_LG[0])
    here = strain(loads_LG, capacities(group_S, capacity_S, groups))
    value, best = min(
        ((strain(loads_LG, capacities(found, capacity_S, groups)), found) for found in candidates), default=(here, [])
    )
    return best if value < here * (1 - 1e-9) else None


def _cover(loads_LG: Sequence[Sequence[float]], capacity_S: Sequence[float], group_S: list[int | None]) -> None:
    """Give every group without seats one, the most loaded the strongest; where none is free, from a group with most."""
    total_G = [sum(loads_L) for loads_L in zip(*loads_LG, strict=True)]
    empty = [group for group in range(len(total_G)) if group not in group_S]
    for group in sorted(empty, key=lambda group: (-total_G[group], group)):
        free = _unassigned(group_S) or _spare(total_G, capacity_S, group_S)
        group_S[min(free, key=lambda seat: (-capacity_S[seat], seat))] = group


def _spare(total_G: Sequence[float], capacity_S: Sequence[float], group_S: Sequence[int | None]) -> list[int]:
    """Seats of the group of several seats that has the least load for its capacity."""
    capacity_G = capacities(group_S, capacity_S, len(total_G))
    several = [group for group in range(len(total_G)) if group_S.count(group) > 1]
    donor = min(several, key=lambda group: (total_G[group] / capacity_G[group], group))
    return [seat for seat, group in enumerate(group_S) if group == donor]


def _best_group(
    loads_LG: Sequence[Sequence[float]],
    capacity_S: Sequence[float],
    group_S: Sequence[int | None],
    seat: int,
) -> int:
    """Where the seat lowers the strain most; where several groups share the maximum, the one loaded most overall."""
    groups = len(loads_LG[0])
    capacity_G = capacities(group_S, capacity_S, groups)
    total_G = [sum(loads_L) for loads_L in zip(*loads_LG, strict=True)]

    def merit(group: int) -> tuple[float, float, int]:
        with_it = [*capacity_G[:group], capacity_G[group] + capacity_S[seat], *capacity_G[group + 1 :]]
        return strain(loads_LG, with_it), -total_G[group] / capacity_G[group], group

    return min(range(groups), key=merit)


def _unassigned(group_S: Sequence[int | None]) -> list[int]:
    return [seat for seat, group in enumerate(group_S) if group is None]
