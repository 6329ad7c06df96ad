"""Tensors that say which rank takes a row's slot, by the placement of experts and the choice among their replicas.

A place is one expert on one rank: an expert with replicas has several places. Rows carry places and not experts, so
that a relay needs not know what their source chose. Legend: E experts, N rows, K slots, P places, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.errors import ConfigError
from services.fabric.link import Experts
from services.fabric.lockstep.rows import Batch
from services.fabric.lockstep.topology import Topology, replica_choice

Held = Mapping[int, tuple[int, ...]]
"""Rank -> ids of the experts of one layer that it holds."""


@dataclass(frozen=True, slots=True)
class _LayerRoutes:
    place_E: Tensor
    rank_P: Tensor
    expert_P: Tensor


class LockstepRoutes:
    """Routes of one rank over all layers.

    Args:
        held: layer -> experts by rank.

    Raises:
        ConfigError: no rank holds some expert.
    """

    def __init__(self, held: Mapping[int, Held], *, num_experts: int, topology: Topology, rank: int) -> None:
        self.rank = rank
        self._layers = {layer: _layer_routes(layer, of, num_experts, topology, rank) for layer, of in held.items()}

    def places(self, layer: int, ids_NK: Tensor) -> Tensor:
        """Return the place of each slot, int64; an id of -1 has the place -1."""
        return _looked_up(self._on(layer, ids_NK).place_E, ids_NK)

    def ranks(self, layer: int, places_NK: Tensor) -> Tensor:
        """Return the rank of each place, int64; the place -1 has the rank -1."""
        return _looked_up(self._on(layer, places_NK).rank_P, places_NK)

    def own_ids(self, layer: int, places_NK: Tensor) -> Tensor:
        """Return the expert ids of the slots that this rank takes, int64, and -1 for all others."""
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
    """The experts of this rank, which compute rows of any rank.

    Args:
        experts: layer -> the experts held here, called with the model's ids, and with -1 for slots of other ranks.
    """

    def __init__(self, experts: Mapping[int, Experts], routes: LockstepRoutes) -> None:
        self._experts = dict(experts)
        self.routes = routes

    def __call__(self, layer: int, batch: Batch) -> Tensor:
        """Return ``y_ND``, the sum of this rank's experts for each row, in the dtype of the rows."""
        if not len(batch) or layer not in self._experts:
            return torch.zeros_like(batch.x_ND)
        ids_NK = self.routes.own_ids(layer, batch.places_NK)
        return self._experts[layer](batch.x_ND, ids_NK, batch.weights_NK)


def _layer_routes(layer: int, held: Held, num_experts: int, topology: Topology, rank: int) -> _LayerRoutes:
    places = [(holder, expert) for holder in sorted(held) for expert in held[holder]]
    holders_E = [[holder for holder in sorted(held) if expert in held[holder]] for expert in range(num_experts)]
    if not all(holders_E):
        raise ConfigError(
            f"Expert {holders_E.index([])} of layer {layer} has no rank.", hint="Give each rank more --expert-slots."
        )
    index = {place: number for number, place in enumerate(places)}
    chosen_E = replica_choice(holders_E, topology)[rank]
    return _LayerRoutes(
        place_E=torch.tensor([index[holder, expert] for expert, holder in enumerate(chosen_E)]),
        rank_P=torch.tensor([holder for holder, _ in places]),
        expert_P=torch.tensor([expert for _, expert in places]),
    )


def _looked_up(table: Tensor, index_NK: Tensor) -> Tensor:
    """Return ``table[index_NK]``, and -1 where the index is -1."""
    return torch.where(index_NK >= 0, table[index_NK.clamp(min=0)], -1)
