"""Shards of the experts, and the local link's count of the rows they take."""

from __future__ import annotations

import torch
from torch import Tensor

from services.fabric.local import LocalLink
from services.model.experts import ExpertShard, ExpertWeights

GENERATOR = torch.Generator().manual_seed(0)
W_GATE_UP = torch.randn(6, 16, 8, generator=GENERATOR)
W_DOWN = torch.randn(6, 8, 8, generator=GENERATOR)


def shard(expert_ids: tuple[int, ...]) -> ExpertShard:
    ids = list(expert_ids)
    held = ExpertWeights(expert_ids=expert_ids, w_gate_up_E2FD=W_GATE_UP[ids], w_down_EDF=W_DOWN[ids])
    return ExpertShard({2: held}, num_experts=6)


def test_shards_add_up_to_the_whole() -> None:
    x_TD = torch.randn(20, 8, generator=GENERATOR)
    ids_TK = torch.rand(20, 6, generator=GENERATOR).topk(3, dim=1).indices
    ids_TK[0, 1] = -1
    weights_TK = torch.rand(20, 3, generator=GENERATOR)
    whole_TD = shard((0, 1, 2, 3, 4, 5)).forward(2, x_TD, ids_TK, weights_TK)
    parts_TD = sum(
        (shard(ids).forward(2, x_TD, ids_TK, weights_TK) for ids in ((4, 1), (5,), (0, 2, 3))), torch.zeros(20, 8)
    )
    torch.testing.assert_close(parts_TD, whole_TD, atol=1e-5, rtol=1e-5)
    assert shard((4, 1)).expert_ids(2) == (4, 1)


def test_local_link_counts_rows_per_expert() -> None:
    def experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        del ids_TK, weights_TK
        return x_TD

    link = LocalLink({1: experts, 4: experts}, num_experts=3)
    ids_TK = torch.tensor([[0, 2], [2, -1], [1, 2]])
    for layer in (1, 1, 4):
        link.combine(link.dispatch(layer, torch.zeros(3, 5), ids_TK, torch.ones(3, 2)))
    assert link.expert_rows() == {1: [2, 2, 6], 4: [1, 1, 3]}
