"""Which rank takes a row's slot, as tensors: from the placement of single experts and the choice among their replicas.

A place is one expert on one rank: where an expert has replicas, it has several places. Rows carry places, not experts,
so that whoever passes them on needs not know what their source chose. Legend: E experts, N rows, K slots, P places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.errors import ConfigError
from services.fabric.lockstep.rows import Batch
from services.fabric.lockstep.topology import Topology, replica_choice

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x_TD, expert_ids_TK, weights_TK) -> y_TD``, as :meth:`services.model.experts.ExpertShard.forward` of one layer."""
Held = Mapping[int, tuple[int, ...]]
"""Rank -> the experts of one layer that it holds."""


@dataclass(frozen=True, slots=True)
class _LayerRoutes:
    place_E: Tensor
    rank_P: Tensor
    expert_P: Tensor


class LockstepRoutes:
    """Routes of one rank over all layers.

    Args:
        held: layer -> who holds what; each expert is held by one rank or more.

    Raises:
        ConfigError: an expert is held by nobody.
    """

    def __init__(self, held: Mapping[int, Held], *, num_experts: int, topology: Topology, rank: int) -> None:
        self.rank = rank
        self._layers = {layer: _layer_routes(layer, of, num_experts, topology, rank) for layer, of in held.items()}

    def places(self, layer: int, ids_NK: Tensor) -> Tensor:
        """Where the slots go; -1 stays -1."""
        return _looked_up(self._on(layer, ids_NK).place_E, ids_NK)

    def ranks(self, layer: int, places_NK: Tensor) -> Tensor:
        return _looked_up(self._on(layer, places_NK).rank_P, places_NK)

    def own_ids(self, layer: int, places_NK: Tensor) -> Tensor:
        """Expert ids of the slots that this rank takes, -1 for all others."""
        routes = self._on(layer, places_NK)
        ids_NK = _looked_up(routes.expert_P, places_NK)
        return torch.where(_looked_up(routes.rank_P, places_NK) == self.rank, ids_NK, -1)

    def _on(self, layer: int, like: Tensor) -> _LayerRoutes:
        routes = self._layers[layer]
        if routes.place_E.device != like.device:
            moved = (getattr(routes, name).to(like.device) for name in ("place_E", "rank_P", "expert_P"))
            routes = self._layers[layer] = _LayerRoutes(*moved)
        return routes


class LockstepExperts:
    """The experts of this rank, called for rows wherever they came from.

    Args:
        experts: layer -> those held here; called with the model's ids, -1 for slots of others.
    """

    def __init__(self, experts: Mapping[int, Experts], routes: LockstepRoutes) -> None:
        self._experts = dict(experts)
        self.routes = routes

    def __call__(self, layer: int, batch: Batch) -> Tensor:
        """``y_ND``: what this rank's experts add to each row."""
        if not len(batch) or layer not in self._experts:
            return torch.zeros_like(batch.x_ND)
        ids_NK = self.routes.own_ids(layer, batch.places_NK)
        return self._experts[layer](batch.x_ND, ids_NK, batch.weights_NK)


def _layer_routes(layer: int, held: Held, num_experts: int, topology: Topology, rank: int) -> _LayerRoutes:
    places = [(holder, expert) for holder in sorted(held) for expert in held[holder]]
    holders_E = [[holder for holder in sorted(held) if expert in held[holder]] for expert in range(num_experts)]
    if not all(holders_E):
        raise ConfigError(
            f"Expert {holders_E.index([])} of layer {layer} is on no rank.", hint="Give each rank more --expert-slots."
        )
    index = {place: number for number, place in enumerate(places)}
    chosen_E = replica_choice(holders_E, topology)[rank]
    return _LayerRoutes(
        place_E=torch.tensor([index[holder, expert] for expert, holder in enumerate(chosen_E)]),
        rank_P=torch.tensor([holder for holder, _ in places]),
        expert_P=torch.tensor([expert for _, expert in places]),
    )


def _looked_up(table: Tensor, index_NK: Tensor) -> Tensor:
    """``table[index_NK]``, -1 where the index is."""
    return torch.where(index_NK >= 0, table[index_NK.clamp(min=0)], -1)
