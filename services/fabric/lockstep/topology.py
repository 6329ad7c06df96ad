"""Says which seats share a node, and which seats relay rows between two nodes. Free of torch.

Rows cross from one node to another through relay pairs of equal local ranks: a seat there, a seat here. Where all nodes
have the same number of seats, every seat is its own relay, as in DeepSpeed's parallelism coordinated communication
(section V-B): p / L messages over the slow links, not p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from services.errors import ConfigError

Pair = tuple[int, int]
"""The seat that sends and the seat that receives; the way back is the pair in reverse."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Seats by node. Example: seats 0 to 3 on ``a``, 4 to 6 on ``b``: ``nodes`` is ((0, 1, 2, 3), (4, 5, 6)); rows of
    seat 3 for ``b`` go 3 -> 0 -> 4, since local rank 3 has no equal there.

    Args:
        nodes: numbers of the seats of each node, ascending; a seat's place among them is its local rank.
        pairs: largest number of relay pairs between two nodes; 0 takes as many as both have seats for. 1 makes the
            smallest number of messages, and the largest ones.
    """

    nodes: tuple[tuple[int, ...], ...]
    pairs: int = 0

    @classmethod
    def of_nodes(cls, node_of: Mapping[int, str], *, pairs: int = 0) -> Topology:
        """Make a topology from seat -> node, with nodes in the order of their lowest seat. Raises ConfigError."""
        members: dict[str, list[int]] = {}
        for seat in sorted(node_of):
            members.setdefault(node_of[seat], []).append(seat)
        if not members or pairs < 0:
            raise ConfigError("A topology needs seats, and 0 or more relay pairs.", hint="Give each seat its node.")
        return cls(nodes=tuple(map(tuple, members.values())), pairs=pairs)

    @cached_property
    def seats(self) -> tuple[int, ...]:
        """Numbers of all seats, ascending."""
        return tuple(sorted(seat for members in self.nodes for seat in members))

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        return {seat: (node, local) for node, members in enumerate(self.nodes) for local, seat in enumerate(members)}

    def node(self, seat: int) -> int:
        """Return the index into ``nodes`` of the node of ``seat``."""
        return self._places[seat][0]

    def local_rank(self, seat: int) -> int:
        """Return the place of ``seat`` among the seats of its node."""
        return self._places[seat][1]

    def neighbours(self, seat: int) -> tuple[int, ...]:
        """Return the other seats of the node of ``seat``."""
        return tuple(other for other in self.nodes[self.node(seat)] if other != seat)

    def relay_pairs(self, node: int, other: int) -> tuple[Pair, ...]:
        """Return the pairs through which rows go from ``node`` to ``other``.

        With less pairs than seats, different nodes use different local ranks, so that no seat relays everything.
        """
        here, there = self.nodes[node], self.nodes[other]
        largest = min(len(here), len(there))
        count = min(self.pairs or largest, largest)
        locals_ = [((node + other) * count + index) % largest for index in range(count)]
        return tuple((here[local], there[local]) for local in sorted(locals_))

    def relay(self, seat: int, node: int) -> Pair:
        """Return the pair through which rows of ``seat`` reach ``node``: a pair with ``seat`` where there is one."""
        pairs = self.relay_pairs(self.node(seat), node)
        own = [pair for pair in pairs if pair[0] == seat]
        return own[0] if own else pairs[self.local_rank(seat) % len(pairs)]

    def partners(self, seat: int) -> Mapping[int, int]:
        """Return node -> the seat there that ``seat`` relays to and from, for all nodes that it relays for."""
        found: dict[int, int] = {}
        for node in range(len(self.nodes)):
            if node != self.node(seat):
                found.update((node, there) for here, there in self.relay_pairs(self.node(seat), node) if here == seat)
        return found

    @cached_property
    def gathers(self) -> bool:
        """Whether some seat is not its own relay, so that relays gather rows inside a node before they cross."""
        return any(
            self.relay(seat, node)[0] != seat
            for seat in self.seats
            for node in range(len(self.nodes))
            if node != self.node(seat)
        )


def replica_choice(holders_E: Sequence[Sequence[int]], topology: Topology) -> dict[int, list[int]]:
    """Return source seat -> the holder to which that seat sends the rows of each expert.

    A holder takes its own rows. The other sources are split evenly over the holders, and prefer those of their node.

    Args:
        holders_E: the seats that hold each expert.
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
