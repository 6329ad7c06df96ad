"""Ops and modules inside of functions that ``torch.compile`` has taken: they run as they are, and give the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from testkit.models.moe_layers import random_layer
from torch import Tensor, nn

from moe_kernels import MixtureOfAttention, SparseMLP, parallel_linear, plan, route

LAYER = random_layer(5, hidden=16, width=8, experts=4, slots=2)
W_EOI = cast("Tensor", LAYER.w_down).mT.contiguous()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """And how many operations each of its graphs has."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    return torch.compile(function, backend=backend), graphs


@pytest.mark.usefixtures("path")
def test_a_layer_by_hand() -> None:
    def layer(x_TD: Tensor, logits_TE: Tensor) -> Tensor:
        ids_TK, weights_TK = route(logits_TE + 1, top_k=2)
        order = plan(ids_TK, 4, block_rows=16)
        y_TD = LAYER.but(x_TD=x_TD * 2, ids_TK=ids_TK, weights_TK=weights_TK)(plan=order)
        return y_TD + 1

    fast, graphs = compiled(layer)
    logits_TE = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert torch.equal(fast(LAYER.x_TD, logits_TE), layer(LAYER.x_TD, logits_TE))
    assert graphs.count(1) >= 2  # what is around the ops is compiled, once


@pytest.mark.usefixtures("path")
def test_a_backward_pass() -> None:
    order = plan(LAYER.ids_TK, 4, block_rows=16)

    def loss(x_TD: Tensor, w_EOI: Tensor) -> Tensor:
        return parallel_linear(x_TD * 2, w_EOI, order, gates=LAYER.weights_TK).square().sum()

    fast, _ = compiled(loss)
    leaves = [LAYER.x_TD.clone().requires_grad_(), W_EOI.clone().requires_grad_()]
    want, actual = (torch.autograd.grad(function(*leaves), leaves) for function in (loss, fast))
    assert all(torch.equal(one, other) for one, other in zip(actual, want, strict=True))


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("make", [
    lambda: SparseMLP(16, 8, experts=4, top_k=2, bias=True, router=True),
    lambda: MixtureOfAttention(16, 4, heads=2, experts=4, top_k=2, router=True),
], ids=["SparseMLP", "MixtureOfAttention"])  # fmt: skip
@pytest.mark.usefixtures("path")
def test_modules(make: Callable[[], nn.Module], record: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 16), make())
    x_BLD = LAYER.x_TD[None]
    fast, _ = compiled(network)
    with torch.set_grad_enabled(record):
        want, actual = network(x_BLD), fast(x_BLD)
    assert torch.equal(actual, want)
    if record:
        leaves = list(network.parameters())
        pairs = [torch.autograd.grad(y.square().sum(), leaves) for y in (want, actual)]
        assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


def test_the_package_does_not_import_the_compiler() -> None:
    program = "import sys, moe_kernels; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
