"""How linear layers outside of experts are held in memory: as numbers of the serving dtype, or quantised. Torch-free.

A :class:`HeldLinears` goes with the spec of a model that is served, and its label with the hash of the weights, as that
of experts does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.model.expert_format import DENSE, Kind, label_of


@dataclass(frozen=True, slots=True)
class HeldLinears:
    """``kinds``: a linear layer, by the name of its first tensor -> how it is held; others are dense. ``label`` names
    all of it, "" if all are dense."""

    kinds: tuple[tuple[str, Kind], ...] = ()
    label: str = ""

    @property
    def title(self) -> str:
        """The label, for messages."""
        return self.label or DENSE


NO_LINEARS = HeldLinears()


def linears_held(kinds: Mapping[str, Kind | None]) -> HeldLinears:
    """Return how linear layers are held, from the kind of each."""
    found, label = label_of(kinds)
    return HeldLinears(found, label)
