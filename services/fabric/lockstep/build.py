"""From a placement and a topology to the link of one rank: flat or hierarchical, with sliced experts or whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.errors import ConfigError
from services.fabric.link import CountingLink
from services.fabric.lockstep.flat import FlatLink
from services.fabric.lockstep.gloo import Wire
from services.fabric.lockstep.hierarchical import HierarchicalLink
from services.fabric.lockstep.routes import Experts, Held, LockstepExperts, LockstepRoutes
from services.fabric.lockstep.sliced import SlicedLink
from services.fabric.lockstep.topology import Topology
from services.fabric.row_counts import ExpertRows
from services.placement import Placement

Way = Literal["flat", "hierarchical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LockstepShape:
    """How the ranks in lock-step share experts.

    Args:
        nodes: name of the node by rank.
        slices: ranks, one after the other, that each hold a slice of the same experts.
        pairs: relay pairs between two nodes at most, 0 for all; concerns ``hierarchical``.
    """

    nodes: tuple[str, ...]
    way: Way
    slices: int = 1
    pairs: int = 0

    def __post_init__(self) -> None:
        if self.slices < 1 or len(self.nodes) % self.slices:
            raise ConfigError(
                f"{len(self.nodes)} ranks cannot hold experts in {self.slices} slices.",
                hint="The slices have to divide the ranks.",
            )

    @property
    def groups(self) -> int:
        """Groups of ranks that hold the same experts: the devices that experts are placed on."""
        return len(self.nodes) // self.slices

    def group_of(self, rank: int) -> int:
        return rank // self.slices

    def slice_of(self, rank: int) -> int:
        return rank % self.slices

    def peers(self, rank: int) -> tuple[int, ...]:
        """Ranks that ``rank`` exchanges rows with, itself among them: those of its slice."""
        return tuple(range(self.slice_of(rank), len(self.nodes), self.slices))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Ranks of its node."""
        return tuple(other for other, node in enumerate(self.nodes) if node == self.nodes[rank])

    def topology(self, rank: int) -> Topology:
        """Of the ranks of its slice."""
        return Topology.of_nodes({peer: self.nodes[peer] for peer in self.peers(rank)}, pairs=self.pairs)


def lockstep_link(
    wire: Wire,
    experts: Mapping[int, Experts],
    *,
    placement: Placement,
    num_experts: int,
    shape: LockstepShape,
    max_rows: int,
) -> CountingLink[Any]:
    """The link of ``wire``'s rank.

    Args:
        experts: layer -> what this rank computes: the experts of its group by ``placement``, or its slice of them.
        placement: layer -> by group the experts that it holds.
        max_rows: most rows of one dispatch, of any rank.
    """
    topology = shape.topology(wire.rank)
    held = {layer: _held(groups, shape, wire.rank) for layer, groups in placement.items()}
    routes = LockstepRoutes(held, num_experts=num_experts, topology=topology, rank=wire.rank)
    inner_rows = max_rows * shape.slices
    link = _inner(
        wire, LockstepExperts(experts, routes), shape, topology, inner_rows, ExpertRows(placement, num_experts)
    )
    if shape.slices == 1:
        return link
    first = shape.group_of(wire.rank) * shape.slices
    group = range(first, first + shape.slices)
    return SlicedLink(link, wire, group=group, max_rows=max_rows, rows=ExpertRows(placement, num_experts))


def _inner(
    wire: Wire, experts: LockstepExperts, shape: LockstepShape, topology: Topology, max_rows: int, rows: ExpertRows
) -> CountingLink[Any]:
    if shape.way == "hierarchical":
        return HierarchicalLink(wire, experts, topology=topology, max_rows=max_rows, rows=rows)
    peers = [peer for peer in topology.seats if peer != wire.rank]
    return FlatLink(wire, experts, peers=peers, max_rows=max_rows, rows=rows)


def _held(groups: tuple[tuple[int, ...], ...], shape: LockstepShape, rank: int) -> Held:
    return {peer: groups[shape.group_of(peer)] for peer in shape.peers(rank)}
