"""Weights of experts as bytes, for another process."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch

from services.model.experts import ExpertWeights


def packed(layers: Mapping[int, ExpertWeights]) -> bytes:
    """Of any device."""
    out = io.BytesIO()
    plain = {
        layer: (held.expert_ids, held.w_gate_up_E2FD.cpu(), held.w_down_EDF.cpu()) for layer, held in layers.items()
    }
    torch.save(plain, out)
    return out.getvalue()


def unpacked(data: bytes, device: torch.device) -> dict[int, ExpertWeights]:
    plain = torch.load(io.BytesIO(data), map_location=device)
    return {
        layer: ExpertWeights(expert_ids=ids, w_gate_up_E2FD=gate_up, w_down_EDF=down)
        for layer, (ids, gate_up, down) in plain.items()
    }
