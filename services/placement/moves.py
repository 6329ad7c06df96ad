"""What a change of the routing table makes seats load, and the order in which they may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.routing import RoutingTable, ShardGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Seat ``seat`` goes from ``source`` (None: it has just joined) to ``target``, the same where its group changed.

    ``experts``: layer -> ids that it has to load; empty where a group only lost experts.
    """

    seat: int
    source: int | None
    target: int
    experts: dict[int, tuple[int, ...]]

    @property
    def count(self) -> int:
        """Experts to load; times the bytes of one, what the move costs."""
        return sum(map(len, self.experts.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A table as the planner changes it. ``group_S``: index into ``groups`` of each seat."""

    groups: tuple[ShardGroup, ...]
    group_S: tuple[int, ...]

    def prices(self, price: float) -> list[float]:
        """By group: what one more expert of a layer costs there, if all that the seats hold costs ``price``."""
        seats = Counter(self.group_S)
        layers = max(1, len(self.groups[0].experts))
        held = sum(seats[index] * _size(group) for index, group in enumerate(self.groups)) / layers
        return [price * seats[index] / held for index in range(len(self.groups))]


def loaded_fraction(before: Layout, after: Layout) -> float:
    """Experts that the seats have to load, over all that they hold afterwards."""
    loaded = sum(
        len(set(experts) - set(before.groups[old].experts.get(layer, ())))
        for old, new in zip(before.group_S, after.group_S, strict=True)
        for layer, experts in after.groups[new].experts.items()
    )
    return loaded / sum(_size(after.groups[group]) for group in after.group_S)


def moves_between(current: RoutingTable, table: RoutingTable) -> tuple[Move, ...]:
    """By seat, those that change group or have experts to load; in a safe order where there is one."""
    held = {group.number: group.experts for group in current.groups}
    groups = {group.number: group.experts for group in table.groups}
    before = {(seat.number, seat.worker): seat.group for seat in current.seats}
    moves = []
    for seat in table.seats:
        source = before.get((seat.number, seat.worker))
        had = held.get(source, {}) if source is not None else {}
        missing = {
            layer: tuple(sorted(set(ids) - set(had.get(layer, ())))) for layer, ids in groups[seat.group].items()
        }
        experts = {layer: ids for layer, ids in missing.items() if ids}
        if source != seat.group or experts:
            moves.append(Move(seat=seat.number, source=source, target=seat.group, experts=experts))
    present = Counter(before[key] for seat in table.seats if (key := (seat.number, seat.worker)) in before)
    return _ordered(moves, present)


def _ordered(moves: Sequence[Move], seats_of: Counter[int]) -> tuple[Move, ...]:
    """Again and again the first that leaves its group a seat; where each takes a last one, the first of all."""
    waiting, ordered = list(moves), []
    while waiting:
        move = next((move for move in waiting if _spares(move, seats_of)), waiting[0])
        waiting.remove(move)
        ordered.append(move)
        seats_of[move.target] += 1
        if move.source is not None:
            seats_of[move.source] -= 1
    return tuple(ordered)


def _spares(move: Move, seats_of: Counter[int]) -> bool:
    return move.source in (None, move.target) or seats_of[move.source or 0] > 1


def _size(group: ShardGroup) -> int:
    return sum(map(len, group.experts.values()))
