"""sparse_mlp against a loop over tokens, its gradients, and the module with its three sources of gates."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_args

import pytest
import torch
from testkit.models.pair_layouts import random_ids
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, route
from moe_kernels.activations.op import Activation, activate, gated
from moe_kernels.plan.op import plan
from moe_kernels.plan.types import Plan
from moe_kernels.training.activation_gradients.op import activation_backward
from moe_kernels.training.sparse_mlp import SparseMLP, softmax_gates, sparse_mlp

both_paths = pytest.mark.usefixtures("path")
# Infinities in interpreted kernels are numpy's to warn of.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
ACTIVATIONS = list(get_args(Activation))
ROUNDINGS = {torch.float32: 32, torch.float16: 8}
"""Two matrices and the roundings between them."""
PLANS: dict[str, dict[str, Any]] = {
    "capacity": {"capacity": 4},
    "capacity by slot": {"capacity": 4, "first_come": "slot"},
    "keep": {"keep_T": torch.arange(12) % 3 > 0},
    "local": {"local_E": torch.tensor([-1, 1, 0], dtype=torch.int32)},
}


def leaves_of(
    tokens: int, slots: int, experts: int, activation: Activation, dtype: torch.dtype, hidden: int = 8, width: int = 12
) -> list[Tensor]:
    """x, w_in, w_out, gates, bias_in, bias_out."""
    generator = torch.Generator().manual_seed(3)
    inner = width * (1 + gated(activation))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    return [
        normal(tokens, hidden, scale=2),
        normal(experts, inner, hidden),
        normal(experts, hidden, width),
        normal(tokens, slots).detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_(),
        normal(experts, inner),
        normal(experts, hidden),
    ]


def run(leaves: list[Tensor], order: Plan, activation: Activation) -> Tensor:
    x, w_in, w_out, gates, bias_in, bias_out = leaves
    return sparse_mlp(x, w_in, w_out, order, gates, activation=activation, bias_in=bias_in, bias_out=bias_out)


def loop(leaves: list[Tensor], order: Plan, activation: Activation) -> Tensor:
    """Pair by pair in float64; a pair's expert is the one whose run of the plan holds its place. Differentiable."""
    x, w_in, w_out, gates, bias_in, bias_out = (leaf.double() for leaf in leaves)
    rows = []
    for token, places in enumerate(order.place_S.view(-1, order.slots).tolist()):
        row_D = 0 * sum(leaf.sum() for leaf in (w_in, w_out, gates, bias_in, bias_out)) + 0 * x[token]
        for slot, place in enumerate(places):
            if place >= 0:
                expert = int((order.ends_E <= place).sum())
                h_F = activate(w_in[expert] @ x[token] + bias_in[expert], activation)
                row_D = row_D + gates[token, slot] * (w_out[expert] @ h_F + bias_out[expert])
        rows.append(row_D)
    return torch.stack(rows)


def assert_gradients(leaves: list[Tensor], order: Plan, activation: Activation) -> None:
    """The result and all six gradients, against the loop's."""
    dtype = leaves[0].dtype
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want_TD, y_TD = loop(wide, order, activation), run(leaves, order, activation)
    assert_close(y_TD, want_TD.detach(), ROUNDINGS[dtype])
    dy_TD = torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    wants = torch.autograd.grad(want_TD, wide, dy_TD.double())
    for actual, want in zip(torch.autograd.grad(y_TD, leaves, dy_TD), wants, strict=True):
        assert_close(actual.to(dtype), want, ROUNDINGS[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_twin_by_finite_differences(activation: Activation) -> None:
    order = plan(random_ids(4, 2, 3, absent=0.2), 3)
    leaves = leaves_of(4, 2, 3, activation, torch.float64, hidden=3, width=2)
    assert torch.autograd.gradcheck(lambda *tensors: run(list(tensors), order, activation), leaves)


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_loop(activation: Activation, dtype: torch.dtype) -> None:
    order = plan(random_ids(11, 2, 4, absent=0.2), 4, block_rows=16)
    assert_gradients(leaves_of(11, 2, 4, activation, dtype), order, activation)


@both_paths
@pytest.mark.parametrize("ids", [[[2]] * 9, [[0, 1], [7, -1]], [[5, 5]] * 3], ids=["one expert", "absent", "none"])
def test_uneven_experts(ids: list[list[int]]) -> None:
    ids_TK = torch.tensor(ids)
    leaves = leaves_of(*ids_TK.shape, 4, "swiglu", torch.float32)
    assert_gradients(leaves, plan(ids_TK, 4, block_rows=16), "swiglu")


@both_paths
@pytest.mark.parametrize("flags", PLANS.values(), ids=PLANS)
def test_pairs_that_a_plan_leaves_out(flags: dict[str, Any]) -> None:
    """They add nothing and get zero gradients. A module takes the plan too, with gradients and without."""
    experts, ids_TK = 2 if "local_E" in flags else 3, random_ids(12, 2, 3)
    order = plan(ids_TK, experts, block_rows=16, **flags)
    assert (order.place_S < 0).any()
    leaves = leaves_of(12, 2, experts, "gelu", torch.float32)
    assert_gradients(leaves, order, "gelu")
    x, w_in, w_out, gates, bias_in, bias_out = leaves
    module = SparseMLP(8, 12, experts=experts, top_k=2, bias=True)
    module.load_state_dict({"w_in": w_in, "w_out": w_out, "bias_in": bias_in, "bias_out": bias_out})
    want_TD = run(leaves, order, "gelu").detach()
    for record in (True, False):
        with torch.set_grad_enabled(record):
            assert_close(module(x, ids_TK=ids_TK, gates_TK=gates, plan=order).detach(), want_TD, 32)


@both_paths
def test_no_tokens() -> None:
    leaves = leaves_of(0, 2, 3, "gelu", torch.float32)
    y_TD = run(leaves, plan(torch.empty(0, 2, dtype=torch.int64), 3), "gelu")
    assert y_TD.shape == (0, 8)
    gradients = torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))
    assert all(torch.equal(gradient, torch.zeros_like(leaf)) for gradient, leaf in zip(gradients, leaves, strict=True))


@both_paths
def test_without_gradients_the_result_is_the_same() -> None:
    order = plan(random_ids(9, 2, 4), 4, block_rows=16)
    leaves = leaves_of(9, 2, 4, "gelu", torch.float32)
    with torch.no_grad():
        inferred = run(leaves, order, "gelu")
    assert not inferred.requires_grad
    assert_close(inferred, run(leaves, order, "gelu").detach())


@both_paths
def test_a_second_backward_pass_gives_the_same() -> None:
    order = plan(random_ids(6, 2, 3), 3, block_rows=16)
    for activation in ("gelu", "swiglu"):
        leaves = leaves_of(6, 2, 3, activation, torch.float32)
        y_TD = run(leaves, order, activation)
        first = torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD), retain_graph=True)
        second = torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD))
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@both_paths
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivative_at_awkward_values(activation: Activation) -> None:
    """Zeros, the bounds of clamps, saturation, NaN: as autograd has it in float64."""
    values = torch.tensor([-100, -7.5, -7, -1, -0.0, 0.0, 1e-6, 2, 7, 7.5, 100, torch.nan])
    grid = torch.cartesian_prod(values, values) if gated(activation) else values.unsqueeze(1)
    pre_S = grid.contiguous()
    order = plan(torch.zeros(len(pre_S), 1, dtype=torch.int64), 1)
    gates_TK, du_SF = torch.full((len(pre_S), 1), 0.5), torch.full((len(pre_S), 1), 3.0)
    dpre_S, weighted_SF, dgates_TK = activation_backward(du_SF.clone(), pre_S, gates_TK, order, activation)
    wide = pre_S.double().requires_grad_()
    h_SF = activate(wide, activation)
    (want,) = torch.autograd.grad(h_SF, wide, torch.full_like(h_SF, 1.5))
    torch.testing.assert_close(dpre_S, want.float(), equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weighted_SF, 0.5 * h_SF.float(), equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dgates_TK, 3 * h_SF.float(), equal_nan=True, atol=1e-5, rtol=1e-5)


@both_paths
def test_example_of_the_docstring() -> None:
    weights = torch.tensor([[[3.0], [-1.0]]]), torch.tensor([[[10.0, 1.0]]])
    order = plan(torch.tensor([[0]]), 1)
    x_TD, gates_TK = torch.tensor([[2.0]]), torch.tensor([[0.5]])
    assert sparse_mlp(x_TD, *weights, order, gates_TK, activation="relu").tolist() == [[30]]


@both_paths
def test_module_with_its_own_router() -> None:
    torch.manual_seed(0)
    module = SparseMLP(8, 12, experts=4, top_k=2, activation="swiglu", bias=True, router=True)
    assert module.router is not None
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = module(x)
    assert y.shape == x.shape
    logits_TE = module.router(x.view(10, 8))
    assert_close(module(x, logits_TE), y.detach())
    ids_TK, gates_TK = route(logits_TE.detach(), top_k=2, renormalise=True)
    assert_close(module(x, ids_TK=ids_TK, gates_TK=gates_TK), y.detach())
    with torch.no_grad():
        assert_close(module(x), y.detach())
        assert_close(module(x[:, :1]), y[:, :1].detach())  # not contiguous, and few tokens
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    assert x.grad is not None


def test_gates_get_the_routers_gradients() -> None:
    logits_TE = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for renormalise in (True, False):
        assert torch.autograd.gradcheck(lambda x, r=renormalise: softmax_gates(x, 2, renormalise=r)[1], logits_TE)
    ids_TK, gates_TK = softmax_gates(torch.tensor([[0, 2, 0, 4]]).float().log(), 2, renormalise=False)
    assert ids_TK.tolist() == [[3, 1]]
    torch.testing.assert_close(gates_TK, torch.tensor([[4 / 6, 2 / 6]]))


def test_wrong_arguments_are_named() -> None:
    order = plan(torch.tensor([[0, 1], [2, 0]]), 3)
    x, w_in, w_out, gates, bias_in, bias_out = (leaf.detach() for leaf in leaves_of(2, 2, 3, "gelu", torch.float32))
    module = SparseMLP(8, 12, experts=3, top_k=2)
    for words, call in {
        r"x \[T, D\]": lambda: sparse_mlp(x[:1], w_in, w_out, order, gates),
        r"w_in \[E, 2 x F, D\]": lambda: sparse_mlp(x, w_in, w_out, order, gates, activation="swiglu"),
        "of the plan's 3 experts": lambda: sparse_mlp(x, w_in[:2], w_out, order, gates),
        r"w_out \[E, D, F\]": lambda: sparse_mlp(x, w_in, w_out.mT, order, gates),
        r"gates \[T, K\]": lambda: sparse_mlp(x, w_in, w_out, order, gates.double()),
        "bias_in": lambda: sparse_mlp(x, w_in, w_out, order, gates, bias_in=bias_out),
        "bias_out": lambda: sparse_mlp(x, w_in, w_out, order, gates, bias_out=bias_in),
        "x must be contiguous": lambda: sparse_mlp(x.t().contiguous().t(), w_in, w_out, order, gates),
        "activation must be one of": lambda: sparse_mlp(x, w_in, w_out, order, gates, activation="tanh"),  # type: ignore[arg-type]
        "pass either router logits or ids": lambda: module(x),
        "ids and gates come together": lambda: module(x, gates_TK=gates),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            call()


@both_paths
def test_module_names_what_does_not_fit() -> None:
    module = SparseMLP(8, 12, experts=3, top_k=2, router=True)
    x = torch.ones(2, 5, 8)
    ids_TK, gates_TK = torch.zeros(10, 2, dtype=torch.int64), torch.ones(10, 2)
    for words, call in {
        r"x must be \[..., D=8\] .*float32, found .*\(2, 5, 7\)": lambda: module(x[..., :7]),
        r"x must be .*found .*float16 of shape \(2, 5, 8\)": lambda: module(x.half()),
        r"x must be .*found .*\(\)": lambda: module(x[0, 0, 0]),
        "x is on meta, the module on cpu": lambda: module(x.to("meta")),
        r"logits must be \[T=10, E=3\], found .*\(10, 4\)": lambda: module(x, torch.ones(10, 4)),
        r"logits must be \[T=10, E=3\], found .*\(9, 3\)": lambda: module(x, torch.ones(9, 3)),
        "logits is on meta": lambda: module(x, torch.ones(10, 3, device="meta")),
        r"ids must be \[T=10, K\], found .*\(9, 2\)": lambda: module(x, ids_TK=ids_TK[:9], gates_TK=gates_TK[:9]),
    }.items():
        for record in (True, False):
            with pytest.raises(ArgumentError, match=words), torch.set_grad_enabled(record):
                call()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"top_k": 4}, r"top_k must be in 1\.\.3 \(experts\), found 4"),
        ({"top_k": 0}, "top_k must be at least 1, found 0"),
        ({"experts": 0}, "experts must be at least 1, found 0"),
        ({"width": 0}, "width must be at least 1, found 0"),
    ],
)
def test_sizes_are_checked_when_a_module_is_made(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        SparseMLP(**{"hidden": 8, "width": 12, "experts": 3, "top_k": 2, **sizes})


def test_float64_with_and_without_gradients() -> None:
    torch.manual_seed(0)
    module = SparseMLP(8, 12, experts=3, top_k=2, router=True, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    with torch.no_grad():
        inferred = module(x)
    assert torch.equal(inferred, module(x).detach())


@both_paths
@pytest.mark.parametrize("record", [True, False])
def test_under_autocast_a_module_runs_in_its_dtype(record: bool) -> None:
    torch.manual_seed(0)
    module = SparseMLP(8, 12, experts=3, top_k=2, activation="swiglu", bias=True, router=True)
    x = torch.randn(5, 8)
    with torch.set_grad_enabled(record):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
            assert torch.equal(y, module(x.bfloat16()))
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, module.bfloat16()(x.bfloat16()))


@both_paths
def test_module_copies_saves_and_casts() -> None:
    torch.manual_seed(0)
    module = SparseMLP(8, 12, experts=3, top_k=2, bias=True, router=True)
    x = torch.randn(5, 8)
    y = module(x)
    other = SparseMLP(8, 12, experts=3, top_k=2, bias=True, router=True)
    other.load_state_dict(module.state_dict())
    for same in (other, copy.deepcopy(module), copy.deepcopy(module).eval(), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(x), y)
    assert copy.deepcopy(module).half()(x.half()).dtype == torch.float16
    assert "experts=3, top_k=2" in repr(module)
