"""Digests of weights that were never in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from services.fabric.tcp.frames import NAMES, bytes_of
from services.model.digests import Digests, LayerDigests
from services.model.experts import ExpertWeights

NO_DIGEST = bytes(32)


def digests_of(layers: Mapping[int, ExpertWeights], num_experts: int) -> Digests:
    """Of the experts that are held; the others have none that could be right."""
    some = next(iter(layers.values()))
    return Digests(
        format=1,
        fingerprint="model",
        dtype=NAMES[some.w_down_EDF.dtype],
        layers={
            layer: LayerDigests(
                gate_up=_by_expert(held.expert_ids, held.w_gate_up_E2FD, num_experts),
                down=_by_expert(held.expert_ids, held.w_down_EDF, num_experts),
            )
            for layer, held in layers.items()
        },
    )


def _by_expert(expert_ids: tuple[int, ...], matrices_E: Tensor, num_experts: int) -> tuple[bytes, ...]:
    found = {
        expert: hashlib.sha256(bytes_of(matrix)).digest() for expert, matrix in zip(expert_ids, matrices_E, strict=True)
    }
    return tuple(found.get(expert, NO_DIGEST) for expert in range(num_experts))
