"""Which experts the tokens of a measurement choose: the same draw for every provider, of which floors are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """``ids_TK`` int32, ``weights_TK`` float32 that add up to 1 per row, ``active`` experts with at least one row."""

    ids_TK: Tensor
    weights_TK: Tensor
    active: int

    @property
    def pairs(self) -> int:
        return self.ids_TK.numel()


def uniform(rows: int, experts: int, slots: int, *, seed: int = 0, device: str = "cpu") -> Draw:
    """Each row chooses ``slots`` different experts, all equally likely. One ``seed``, one draw, on every machine."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rows)
    logits_TE = torch.randn(rows, experts, generator=generator)
    chosen = torch.topk(torch.softmax(logits_TE, dim=-1), slots)
    return _draw(chosen.indices, chosen.values / chosen.values.sum(dim=-1, keepdim=True), device)


def over_first(rows: int, experts: int, slots: int, *, seed: int = 0, device: str = "cpu") -> Draw:
    """Pairs dealt evenly over the first ``experts``: an exact number of active ones (Elephants, Table 1)."""
    generator = torch.Generator().manual_seed(seed)
    ids_S = torch.arange(rows * slots) % experts
    ids_TK = ids_S.view(rows, slots)[torch.randperm(rows, generator=generator)]
    return _draw(ids_TK, torch.full((rows, slots), 1.0 / slots), device)


def _draw(ids_TK: Tensor, weights_TK: Tensor, device: str) -> Draw:
    active = len(set(ids_TK.flatten().tolist()))
    ids, weights = ids_TK.to(device, torch.int32).contiguous(), weights_TK.to(device, torch.float32).contiguous()
    return Draw(ids_TK=ids, weights_TK=weights, active=active)
