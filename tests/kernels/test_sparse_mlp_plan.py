"""SparseMLP with a plan of the caller's: capacity, rows that are kept, experts that are here; forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.models.pair_layouts import random_ids
from testkit.models.tolerances import assert_close
from torch import Tensor

import moe_kernels as mk
from moe_kernels import ArgumentError, Plan, SparseMLP, plan

pytestmark = pytest.mark.usefixtures("path")
IDS_TK = random_ids(12, 2, 3)
KEEP_T = torch.arange(12) % 3 > 0
LOCAL_E = torch.tensor([-1, 1, 0], dtype=torch.int32)
PLANS: dict[str, dict[str, Any]] = {
    "capacity": {"capacity": 4},
    "capacity by slot": {"capacity": 4, "first_come": "slot"},
    "keep": {"keep_T": KEEP_T},
    "local": {"local_E": LOCAL_E},
}


def module_of(experts: int = 3, **options: Any) -> SparseMLP:
    torch.manual_seed(0)
    return SparseMLP(8, 6, experts=experts, top_k=2, bias=True, **options)


def definition(module: SparseMLP, x_TD: Tensor, order: Plan, gates_TK: Tensor) -> Tensor:
    """Pair by pair in float64; a pair's expert is the one whose run of the plan holds its place. Differentiable."""
    assert module.bias_in is not None
    assert module.bias_out is not None
    w_in, w_out, bias_in, bias_out = (p.double() for p in (module.w_in, module.w_out, module.bias_in, module.bias_out))
    rows = []
    for token in range(len(x_TD)):
        row_D = 0 * x_TD[token].double() + 0 * gates_TK.sum()
        for slot, place in enumerate(order.place_S.view(-1, 2)[token].tolist()):
            if place >= 0:
                e = int((order.ends_E <= place).sum())
                h_F = torch.nn.functional.gelu(w_in[e] @ x_TD[token].double() + bias_in[e])
                row_D = row_D + gates_TK[token, slot].double() * (w_out[e] @ h_F + bias_out[e])
        rows.append(row_D)
    return torch.stack(rows)


@pytest.mark.parametrize("flags", PLANS.values(), ids=PLANS)
def test_forward_and_gradients(flags: dict[str, Any]) -> None:
    experts = 2 if "local_E" in flags else 3
    module, order = module_of(experts), plan(IDS_TK, experts, block_rows=16, **flags)
    assert (order.place_S < 0).any()
    x_TD, gates_TK = torch.randn(12, 8).requires_grad_(), torch.rand(12, 2).requires_grad_()
    leaves = [x_TD, gates_TK, *module.parameters()]
    y_TD = module(x_TD, ids_TK=IDS_TK, gates_TK=gates_TK, plan=order)
    want_TD = definition(module, x_TD, order, gates_TK)
    assert_close(y_TD, want_TD.detach(), 32)
    dy_TD = torch.randn(12, 8)
    wants = torch.autograd.grad(want_TD, leaves, dy_TD.double())
    for gradient, want in zip(torch.autograd.grad(y_TD, leaves, dy_TD), wants, strict=True):
        assert_close(gradient, want, 32)
    with torch.no_grad():
        assert_close(module(x_TD, ids_TK=IDS_TK, gates_TK=gates_TK, plan=order), want_TD, 32)


def test_with_its_own_router_and_more_dimensions() -> None:
    module = module_of(router=True)
    assert module.router is not None
    x_BLD = torch.randn(2, 6, 8)
    logits_TE = module.router(x_BLD.view(12, 8))
    ids_TK, _ = mk.route(logits_TE.detach(), top_k=2)
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


def test_the_op_is_public() -> None:
    from moe_kernels.training.sparse_mlp import sparse_mlp

    assert mk.sparse_mlp is sparse_mlp
