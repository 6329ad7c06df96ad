"""Which seats share a node, and who carries rows between two nodes. Derived from a routing table; torch-free.

Rows that cross from one node to another do so through relay pairs: a seat there, a seat here, with equal local ranks.
Where all nodes have as many seats, every seat is its own relay, and rows cross only between seats of one local rank, as
in DeepSpeed's parallelism coordinated communication (section V-B): p / L messages over the slow links, not p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from services.errors import ConfigError

Pair = tuple[int, int]
"""Seat that sends, seat that receives; the way back is the same pair in reverse."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Seats by node. Example: seats 0 to 3 on ``a``, 4 to 6 on ``b``: ``nodes`` is ((0, 1, 2, 3), (4, 5, 6)); rows of
    seat 3 for ``b`` go 3 -> 0 -> 4, since local rank 3 has no equal there.

    Args:
        nodes: numbers of the seats of each node, ascending; a seat's place among them is its local rank.
        pairs: relay pairs between two nodes at most; 0 is as many as both have seats for. 1 makes the fewest, largest
            messages.
    """

    nodes: tuple[tuple[int, ...], ...]
    pairs: int = 0

    @classmethod
    def of_nodes(cls, node_of: Mapping[int, str], *, pairs: int = 0) -> Topology:
        """Of seat number -> node. Nodes come in the order of their lowest seat."""
        members: dict[str, list[int]] = {}
        for seat in sorted(node_of):
            members.setdefault(node_of[seat], []).append(seat)
        if not members or pairs < 0:
            raise ConfigError("A topology needs seats, and 0 or more relay pairs.", hint="Give each seat its node.")
        return cls(nodes=tuple(map(tuple, members.values())), pairs=pairs)

    @cached_property
    def seats(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted(seat for members in self.nodes for seat in members))

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        return {seat: (node, local) for node, members in enumerate(self.nodes) for local, seat in enumerate(members)}

    def node(self, seat: int) -> int:
        """Index into ``nodes``."""
        return self._places[seat][0]

    def local_rank(self, seat: int) -> int:
        return self._places[seat][1]

    def neighbours(self, seat: int) -> tuple[int, ...]:
        """The other seats of its node."""
        return tuple(other for other in self.nodes[self.node(seat)] if other != seat)

    @property
    def regular(self) -> bool:
        """Whether all nodes have as many seats."""
        return len({len(members) for members in self.nodes}) == 1

    def relay_pairs(self, node: int, other: int) -> tuple[Pair, ...]:
        """Through which rows go from ``node`` to ``other``. With fewer pairs than seats, different nodes are served by
        different local ranks, so that no seat carries everything."""
        here, there = self.nodes[node], self.nodes[other]
        most = min(len(here), len(there))
        count = min(self.pairs or most, most)
        locals_ = [((node + other) * count + index) % most for index in range(count)]
        return tuple((here[local], there[local]) for local in sorted(locals_))

    def relay(self, seat: int, node: int) -> Pair:
        """The pair through which rows of ``seat`` reach ``node``: its own where it is in one."""
        pairs = self.relay_pairs(self.node(seat), node)
        own = [pair for pair in pairs if pair[0] == seat]
        return own[0] if own else pairs[self.local_rank(seat) % len(pairs)]

    def partners(self, seat: int) -> Mapping[int, int]:
        """Node -> the seat there that ``seat`` relays to and from; nodes that it is no relay for are left out."""
        found: dict[int, int] = {}
        for node in range(len(self.nodes)):
            if node != self.node(seat):
                found.update((node, there) for here, there in self.relay_pairs(self.node(seat), node) if here == seat)
        return found

    @cached_property
    def gathers(self) -> bool:
        """Whether some seat is not its own relay, so that rows are gathered inside a node before they cross."""
        return any(
            self.relay(seat, node)[0] != seat
            for seat in self.seats
            for node in range(len(self.nodes))
            if node != self.node(seat)
        )


def replica_choice(holders_E: Sequence[Sequence[int]], topology: Topology) -> dict[int, list[int]]:
    """Source seat -> holder by expert: where that seat sends rows of each expert.

    A holder takes its own rows. The other sources are split evenly over the holders, those of the own node first.

    Args:
        holders_E: by expert, the seats that hold it.
    """
    chosen: dict[int, list[int]] = {seat: [] for seat in topology.seats}
    for holders in holders_E:
        for source, holder in _shared_out(sorted(holders), topology).items():
            chosen[source].append(holder)
    return chosen


def _shared_out(holders: Sequence[int], topology: Topology) -> dict[int, int]:
    quota = -(-len(topology.seats) // len(holders))
    taken = dict.fromkeys(holders, 1)
    found = {holder: holder for holder in holders}
    for source in topology.seats:
        if source not in found:
            free = [holder for holder in holders if taken[holder] < quota]
            found[source] = min(
                free, key=lambda holder: (topology.node(holder) != topology.node(source), taken[holder])
            )
            taken[found[source]] += 1
    return found
