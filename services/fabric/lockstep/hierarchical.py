"""ExpertLink among ranks in lock-step on several nodes: a row crosses to a node once, one partial sum comes back.

    1  inside the node   to the ranks there that hold experts of a row, and to its relay where that is another rank
    2  across nodes      from relay to relay, the rows of all the ranks that it gathered, each row once per node
    3  inside the node   from the relay to the ranks that hold experts of a row

then the experts, and the same hops back: each relay adds the partial sums of its node before they cross. A rank sends
at most (n - 1) + 2 (L - 1) messages each way, for n nodes of L ranks: O(p / L) + O(L) where flat needs p - 1.
That is the schedule of DeepSpeed Inference (section V-B, parallelism coordinated communication) for rows that are not
replicated.
Legend: N rows of a batch, D hidden size, K slots per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.fabric.link import SynchronousLink
from services.fabric.lockstep.flat import Tags
from services.fabric.lockstep.gloo import Exchange, Wire
from services.fabric.lockstep.routes import LockstepExperts
from services.fabric.lockstep.rows import Batch, Hop, answers, forward_rows, joined, received, room_for
from services.fabric.lockstep.topology import Topology
from services.fabric.row_counts import ExpertRows

NODE, ACROSS, SPREAD = 0, 1, 2
"""The three hops, in order; the way back of a hop has its tag + ``BACK``."""
BACK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hops:
    """What one rank does in each hop: the next rank by the holder of the expert, and from whom how many rows come."""

    next_rank: Mapping[int, tuple[int, ...]]
    to: Mapping[int, tuple[int, ...]]
    most_from: Mapping[int, Mapping[int, int]]


@dataclass(slots=True)
class _Flight:
    """One dispatch under way."""

    layer: int
    tag: int
    own: Batch
    exchanges: dict[int, Exchange]
    backs: dict[int, Exchange]
    hops: dict[int, Hop]


class HierarchicalLink(SynchronousLink):
    """Equal to the flat link but for the order in which a row's outputs are added.

    Args:
        max_rows: most rows of one dispatch, of any rank.
    """

    def __init__(
        self, wire: Wire, experts: LockstepExperts, *, topology: Topology, max_rows: int, rows: ExpertRows
    ) -> None:
        self._wire, self._experts = wire, experts
        self._gathers = topology.gathers
        self._hops = _hops(topology, wire.rank, max_rows)
        self._max_rows = max_rows
        self._rows = rows
        self._tags = Tags()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> _Flight:
        """Raises LockstepBroken."""
        assert len(x_TD) <= self._max_rows, "the other ranks have no room for so many rows"
        self._rows.count(layer, expert_ids_TK)
        places_TK = self._experts.routes.places(layer, expert_ids_TK)
        own = Batch(x_ND=x_TD, places_NK=places_TK, weights_NK=weights_TK)
        flight = _Flight(layer, self._tags.next(), own, {}, {}, {})
        for hop in (NODE, ACROSS, SPREAD):
            most = self._hops.most_from[hop]
            room = {peer: room_for(rows, own) for peer, rows in most.items()}
            flight.exchanges[hop] = self._wire.open(flight.tag + hop, room)
        self._forward(flight, NODE, own)
        if not self._gathers:
            self._forward(flight, ACROSS, own)
        return flight

    def combine(self, flight: _Flight) -> Tensor:
        """Raises LockstepBroken."""
        own = flight.own
        near, near_from = received(flight.exchanges[NODE].wait(), own)
        if self._gathers:
            self._forward(flight, ACROSS, joined([own, near], own))
        far, far_from = received(flight.exchanges[ACROSS].wait(), own)
        self._forward(flight, SPREAD, far)
        spread, spread_from = received(flight.exchanges[SPREAD].wait(), own)
        y_ND = self._experts(flight.layer, joined([own, near, far, spread], own)).float()
        sizes = (len(own) + len(near), len(far), len(spread))
        crossing_ND, far_ND, spread_ND = y_ND.split_with_sizes(sizes)
        self._back(flight, SPREAD, spread_ND, spread_from, far_ND)
        self._back(flight, ACROSS, far_ND, far_from, crossing_ND)
        own_ND, near_ND = crossing_ND.split_with_sizes((len(own), len(near)))
        self._back(flight, NODE, near_ND, near_from, own_ND)
        return own_ND.to(own.x_ND.dtype)

    def expert_rows(self) -> dict[int, list[int]]:
        """Rows that each expert was sent by this rank, by layer."""
        return self._rows.totals()

    def _forward(self, flight: _Flight, hop: int, batch: Batch) -> None:
        ranks_NK = self._experts.routes.ranks(flight.layer, batch.places_NK)
        table = torch.tensor([*self._hops.next_rank[hop], -1], device=ranks_NK.device)  # index -1: no rank
        flight.hops[hop], messages = forward_rows(batch, table[ranks_NK], self._hops.to[hop])
        flight.exchanges[hop].send(messages)
        row_bytes = batch.x_ND.shape[1] * batch.x_ND.element_size()
        back = flight.hops[hop].sizes(row_bytes)
        flight.backs[hop] = self._wire.open(flight.tag + BACK + hop, back, exact=True)

    def _back(self, flight: _Flight, hop: int, y_ND: Tensor, origins: list[tuple[int, int]], into_ND: Tensor) -> None:
        """Send the outputs of the rows that came by ``hop``; add what comes back to those that were sent."""
        dtype = flight.own.x_ND.dtype
        flight.backs[hop].send(answers(y_ND, origins, dtype))
        flight.hops[hop].add(into_ND, flight.backs[hop].wait(), dtype)


def _hops(topology: Topology, rank: int, max_rows: int) -> _Hops:
    node, partners, neighbours = topology.node(rank), topology.partners(rank), topology.neighbours(rank)
    first, second, third = [], [], []
    for holder in range(max(topology.seats) + 1):
        where = topology.node(holder) if holder in topology.seats else node
        relay = topology.relay(rank, where)[0] if where != node else holder
        first.append(relay if relay in neighbours else -1)
        second.append(partners.get(where, -1))
        third.append(holder if holder in neighbours else -1)
    relays = [other for other in neighbours if topology.partners(other)]
    return _Hops(
        next_rank={NODE: tuple(first), ACROSS: tuple(second), SPREAD: tuple(third)},
        to={NODE: neighbours, ACROSS: tuple(partners.values()), SPREAD: neighbours if partners else ()},
        most_from={
            NODE: dict.fromkeys(neighbours, max_rows),
            ACROSS: {there: _gathered(topology, where) * max_rows for where, there in partners.items()},
            SPREAD: {
                relay: sum(_gathered(topology, where) * max_rows for where in topology.partners(relay))
                for relay in relays
            },
        },
    )


def _gathered(topology: Topology, node: int) -> int:
    """Ranks whose rows one relay of ``node`` may carry."""
    return len(topology.nodes[node]) if topology.gathers else 1
