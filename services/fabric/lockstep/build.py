"""Builds the link of one rank from placement and topology: flat or hierarchical, with whole or sliced experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.errors import ConfigError
from services.fabric.link import CountingLink, Experts
from services.fabric.lockstep.flat import FlatLink
from services.fabric.lockstep.gloo import Wire
from services.fabric.lockstep.hierarchical import HierarchicalLink
from services.fabric.lockstep.routes import LockstepExperts, LockstepRoutes
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
        slices: number of consecutive ranks that each hold a slice of the same experts.
        pairs: largest number of relay pairs between two nodes, 0 for all; it concerns ``hierarchical``.

    Raises:
        ConfigError: the slices do not divide the ranks.
    """

    nodes: tuple[str, ...]
    way: Way
    slices: int = 1
    pairs: int = 0

    def __post_init__(self) -> None:
        if self.slices < 1 or len(self.nodes) % self.slices:
            raise ConfigError(
                f"{len(self.nodes)} ranks are not a multiple of {self.slices} expert slices.",
                hint="Each expert is split over that many ranks: change one of the two.",
            )

    @property
    def groups(self) -> int:
        """Number of groups of ranks that hold the same experts: the devices that experts are placed on."""
        return len(self.nodes) // self.slices

    def group_of(self, rank: int) -> int:
        """Return the group of ``rank``."""
        return rank // self.slices

    def slice_of(self, rank: int) -> int:
        """Return which slice of its group's experts ``rank`` holds."""
        return rank % self.slices

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that exchange rows with ``rank``, itself among them: those with the same slice."""
        return tuple(range(self.slice_of(rank), len(self.nodes), self.slices))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the node of ``rank``, itself among them."""
        return tuple(other for other, node in enumerate(self.nodes) if node == self.nodes[rank])

    def topology(self, rank: int) -> Topology:
        """Return the topology of the peers of ``rank``."""
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
    """Return the link of ``wire``'s rank.

    Args:
        experts: layer -> the experts that this rank computes: its group's by ``placement``, or its slice of them.
        placement: layer -> ids of experts by group.
        max_rows: largest number of rows of one dispatch, of any rank.
    """
    rank, topology = wire.rank, shape.topology(wire.rank)
    held = {
        layer: {peer: groups[shape.group_of(peer)] for peer in shape.peers(rank)} for layer, groups in placement.items()
    }
    here = LockstepExperts(experts, LockstepRoutes(held, num_experts=num_experts, topology=topology, rank=rank))
    sizes: dict[str, Any] = {"max_rows": max_rows * shape.slices, "rows": ExpertRows(placement, num_experts)}
    link: CountingLink[Any]
    if shape.way == "hierarchical":
        link = HierarchicalLink(wire, here, topology=topology, **sizes)
    else:
        link = FlatLink(wire, here, peers=[peer for peer in topology.seats if peer != rank], **sizes)
    if shape.slices == 1:
        return link
    first = shape.group_of(rank) * shape.slices
    group = range(first, first + shape.slices)
    return SlicedLink(link, wire, group=group, max_rows=max_rows, rows=ExpertRows(placement, num_experts))
