"""Biases of experts, in the serving dtype however the experts are held.

Legend: E experts, F expert width, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from services.model.experts import ExpertWeights
from services.model.names import FfnNames
from services.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Biases:
    """Those of a layer, those of gate projections before those of up projections; None where there are none."""

    in_E2F: Tensor | None = None
    down_ED: Tensor | None = None

    def of(self, experts: ExpertWeights) -> ExpertWeights:
        return replace(experts, bias_gate_up_E2F=self.in_E2F, bias_down_ED=self.down_ED)


def place_biases(
    spec: ModelSpec,
    ffns: Sequence[FfnNames],
    empty: Callable[[int, int], Tensor],
    into: Callable[[Tensor, str], object],
) -> Biases:
    """Return the biases of the experts ``ffns``, made by ``empty``; ``into`` has a tensor of a name read into one."""
    if not spec.expert_bias:
        return Biases()
    width = spec.expert_ffn
    in_E2F, down_ED = empty(len(ffns), 2 * width), empty(len(ffns), spec.hidden_size)
    for slot, names in enumerate(ffns):
        row, (gate, up, down) = slice(slot, slot + 1), names.biases
        into(in_E2F[row, :width], gate)
        into(in_E2F[row, width:], up)
        into(down_ED[row], down)
    return Biases(in_E2F, down_ED)
