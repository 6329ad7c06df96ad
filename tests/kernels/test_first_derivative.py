"""Second derivatives are refused, not computed without their missing terms; checkpoints and kept graphs go through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from testkit.models.tolerances import assert_close
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_kernels import ArgumentError, SparseMLP, parallel_linear, plan, sparse_mlp
from moe_kernels.rotary.op import rotate_heads

pytestmark = pytest.mark.usefixtures("path")
IDS_TK = torch.tensor([[0, 1], [2, 0], [1, 2]])
ORDER = plan(IDS_TK, 3, block_rows=16)
Run = Callable[[Tensor], Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def mlp(x_TD: Tensor) -> Tensor:
    return sparse_mlp(x_TD, normal(3, 6, 8), normal(3, 8, 6), ORDER, normal(3, 2))


OPS: dict[str, Run] = {
    "parallel_linear": lambda x: parallel_linear(x, normal(3, 5, 8), ORDER),
    "parallel_linear with gates": lambda x: parallel_linear(x, normal(3, 5, 8), ORDER, gates=normal(3, 2)),
    "sparse_mlp": mlp,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("power", [1, 2], ids=["dy is constant", "dy depends on x"])
def test_create_graph_is_refused(op: str, power: int) -> None:
    x_TD = normal(3, 8).requires_grad_()
    loss = OPS[op](x_TD).pow(power).sum()
    with pytest.raises(ArgumentError, match=rf"{op.split()[0]} has no second derivative: do not pass create_graph=Tru"):
        torch.autograd.grad(loss, x_TD, create_graph=True)
    torch.autograd.grad(loss, x_TD)  # the graph is still whole


def test_turned_heads() -> None:
    """The reference is made of torch's own operations, which have one."""
    x = normal(1, 2, 1, 1, 1, 4).requires_grad_()
    turned = rotate_heads(x, normal(1, 2, 2))
    if "RotateHeads" in type(turned.grad_fn).__name__:
        with pytest.raises(ArgumentError, match="rotate_heads has no second derivative"):
            torch.autograd.grad(turned.sum(), x, create_graph=True)
    (dx,) = torch.autograd.grad(turned.square().sum(), x)
    torch.testing.assert_close(dx, 2 * x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_checkpoints_and_kept_graphs(op: str, reentrant: bool) -> None:
    x_TD, kept_TD = normal(3, 8).requires_grad_(), normal(3, 8).requires_grad_()
    loss = OPS[op](kept_TD).square().sum()
    loss.backward(retain_graph=True)
    first = kept_TD.grad
    assert first is not None
    assert first.abs().sum() > 0
    (again,) = torch.autograd.grad(loss, kept_TD)
    assert torch.equal(again, first)
    checkpoint(OPS[op], x_TD, use_reentrant=reentrant).square().sum().backward()
    assert x_TD.grad is not None
    assert torch.equal(x_TD.grad, first)


def test_a_checkpointed_module() -> None:
    torch.manual_seed(0)
    module = SparseMLP(8, 6, experts=3, top_k=2, bias=True, router=True)
    x_TD = normal(3, 8).requires_grad_()
    want = torch.autograd.grad(module(x_TD).square().sum(), [x_TD, *module.parameters()])
    for reentrant in (True, False):
        y_TD = checkpoint(module, x_TD, use_reentrant=reentrant)
        y_TD.square().sum().backward()
        leaves = [x_TD, *module.parameters()]
        for leaf, gradient in zip(leaves, want, strict=True):
            assert leaf.grad is not None
            assert_close(leaf.grad, gradient, 32)  # a reentrant checkpoint's first pass records nothing: other kernels
        for leaf in leaves:
            leaf.grad = None
