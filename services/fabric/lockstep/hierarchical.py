"""ExpertLink among ranks in lock-step on several nodes: a row crosses to a node once, one partial sum comes back.

    1  inside the node   to the ranks there that hold experts of a row, and to its relay where that is another rank
    2  across nodes      from relay to relay, the rows of all ranks that it gathered, each row once per node
    3  inside the node   from the relay to the ranks that hold experts of a row

Outputs take the same hops back: each relay adds the partial sums of its node before they cross. For n nodes of L ranks
a rank sends at most (n - 1) + 2 (L - 1) messages each way, where flat needs p - 1. That is the schedule of DeepSpeed
Inference (section V-B, parallelism coordinated communication) for rows that are not replicated.
Legend: N rows of a batch, D hidden size, K slots per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.fabric.lockstep.flat import Tags
from services.fabric.lockstep.gloo import Exchange, Wire
from services.fabric.lockstep.routes import LockstepExperts
from services.fabric.lockstep.rows import Batch, Hop, answers, forward_rows, joined, received, room_for
from services.fabric.lockstep.topology import Topology
from services.fabric.row_counts import CountedLink, ExpertRows

NODE, ACROSS, SPREAD = 0, 1, 2
"""The three hops, in order; the way back of a hop has the hop's tag + ``BACK``."""
BACK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hops:
    """The next rank by holder of the expert, the receivers, and the largest number of rows by sender, for each hop."""

    next_rank: Mapping[int, tuple[int, ...]]
    to: Mapping[int, tuple[int, ...]]
    max_from: Mapping[int, Mapping[int, int]]


@dataclass(slots=True)
class HierarchicalHandle:
    """A dispatch in flight, with its exchanges by hop."""

    layer: int
    tag: int
    own: Batch
    exchanges: dict[int, Exchange]
    backs: dict[int, Exchange]
    hops: dict[int, Hop]


class HierarchicalLink(CountedLink):
    """Computes what the flat link does, except for the order in which a row's outputs are added.

    Args:
        max_rows: largest number of rows of one dispatch, of any rank.
    """

    def __init__(
        self, wire: Wire, experts: LockstepExperts, *, topology: Topology, max_rows: int, rows: ExpertRows
    ) -> None:
        super().__init__(rows)
        self._wire, self._experts = wire, experts
        self._gathers = topology.gathers
        self._hops = _hops(topology, wire.rank, max_rows)
        self._max_rows, self._tags = max_rows, Tags()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HierarchicalHandle:
        """Send rows on their first hop, and on the second one unless relays gather rows. Raises LockstepBroken."""
        assert len(x_TD) <= self._max_rows, "the other ranks have no room for so many rows"
        self._rows.count(layer, expert_ids_TK)
        places_TK = self._experts.routes.places(layer, expert_ids_TK)
        own = Batch(x_ND=x_TD, places_NK=places_TK, weights_NK=weights_TK)
        handle = HierarchicalHandle(layer, self._tags.next(), own, {}, {}, {})
        for hop in (NODE, ACROSS, SPREAD):
            room = {peer: room_for(rows, own) for peer, rows in self._hops.max_from[hop].items()}
            handle.exchanges[hop] = self._wire.open(handle.tag + hop, room)
        self._forward(handle, NODE, own)
        if not self._gathers:
            self._forward(handle, ACROSS, own)
        return handle

    def combine(self, handle: HierarchicalHandle) -> Tensor:
        """Do the other hops, compute, and bring the sums back. Raises LockstepBroken."""
        own = handle.own
        near, near_from = received(handle.exchanges[NODE].wait(), own)
        if self._gathers:
            self._forward(handle, ACROSS, joined([own, near], own))
        far, far_from = received(handle.exchanges[ACROSS].wait(), own)
        self._forward(handle, SPREAD, far)
        spread, spread_from = received(handle.exchanges[SPREAD].wait(), own)
        y_ND = self._experts(handle.layer, joined([own, near, far, spread], own)).float()
        sizes = (len(own) + len(near), len(far), len(spread))
        crossing_ND, far_ND, spread_ND = y_ND.split_with_sizes(sizes)
        self._back(handle, SPREAD, spread_ND, spread_from, far_ND)
        self._back(handle, ACROSS, far_ND, far_from, crossing_ND)
        own_ND, near_ND = crossing_ND.split_with_sizes((len(own), len(near)))
        self._back(handle, NODE, near_ND, near_from, own_ND)
        return own_ND.to(own.x_ND.dtype)

    def _forward(self, handle: HierarchicalHandle, hop: int, batch: Batch) -> None:
        ranks_NK = self._experts.routes.ranks(handle.layer, batch.places_NK)
        table = torch.tensor([*self._hops.next_rank[hop], -1], device=ranks_NK.device)  # index -1: no rank
        handle.hops[hop], messages = forward_rows(batch, table[ranks_NK], self._hops.to[hop])
        handle.exchanges[hop].send(messages)
        row_bytes = batch.x_ND.shape[1] * batch.x_ND.element_size()
        back = handle.hops[hop].sizes(row_bytes)
        handle.backs[hop] = self._wire.open(handle.tag + BACK + hop, back, exact=True)

    def _back(
        self, handle: HierarchicalHandle, hop: int, y_ND: Tensor, origins: list[tuple[int, int]], into_ND: Tensor
    ) -> None:
        """Send the outputs of rows that came by ``hop``; add the outputs of rows that left by it to ``into_ND``."""
        dtype = handle.own.x_ND.dtype
        handle.backs[hop].send(answers(y_ND, origins, dtype))
        handle.hops[hop].add(into_ND, handle.backs[hop].wait(), dtype)


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
        max_from={
            NODE: dict.fromkeys(neighbours, max_rows),
            ACROSS: {there: _gathered(topology, where) * max_rows for where, there in partners.items()},
            SPREAD: {
                relay: sum(_gathered(topology, where) * max_rows for where in topology.partners(relay))
                for relay in relays
            },
        },
    )


def _gathered(topology: Topology, node: int) -> int:
    """Return the number of ranks whose rows one relay of ``node`` may carry."""
    return len(topology.nodes[node]) if topology.gathers else 1
