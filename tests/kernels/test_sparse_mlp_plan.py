"""SparseMLP with a plan of the caller's and a router of its own, and plans that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.models.pair_layouts import random_ids

from moe_kernels import ArgumentError, SparseMLP, plan, route

pytestmark = pytest.mark.usefixtures("path")
IDS_TK = random_ids(12, 2, 3)


def module_of(**options: Any) -> SparseMLP:
    torch.manual_seed(0)
    return SparseMLP(8, 6, experts=3, top_k=2, bias=True, **options)


def test_with_its_own_router_and_more_dimensions() -> None:
    module = module_of(router=True)
    assert module.router is not None
    x_BLD = torch.randn(2, 6, 8)
    logits_TE = module.router(x_BLD.view(12, 8))
    ids_TK, _ = route(logits_TE.detach(), top_k=2)
    order = plan(ids_TK, 3, block_rows=16, capacity=3)
    y_BLD = module(x_BLD, plan=order)
    assert y_BLD.shape == x_BLD.shape
    assert not torch.equal(y_BLD, module(x_BLD))
    assert torch.equal(module(x_BLD, logits_TE, plan=order), y_BLD)
    y_BLD.square().sum().backward()
    assert module.router.weight.grad is not None
    assert module.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("record", [True, False])
def test_a_plan_that_does_not_fit_is_named(record: bool) -> None:
    module, x_TD, gates_TK = module_of(), torch.randn(12, 8), torch.rand(12, 2)
    fits = "plan must be of 24 pairs of 2 slots and 3 experts, found "
    for words, order in {
        f"{fits}22 pairs of 2 slots and 3 experts": plan(IDS_TK[1:], 3),
        f"{fits}24 pairs of 4 slots and 3 experts": plan(IDS_TK.view(6, 4), 3),
        f"{fits}24 pairs of 2 slots and 4 experts": plan(IDS_TK, 4),
        "plan must have block_rows in .*, found 8": plan(IDS_TK, 3, block_rows=8),
        "plan must be what moe_kernels.plan.op makes, found dict": {},
    }.items():
        with pytest.raises(ArgumentError, match=words), torch.set_grad_enabled(record):
            module(x_TD, ids_TK=IDS_TK, gates_TK=gates_TK, plan=order)
