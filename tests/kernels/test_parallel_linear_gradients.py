"""Gradients of parallel_linear: the reference by finite differences, the kernels against the loop's own gradients."""

from __future__ import annotations

import pytest
import torch
from testkit.models.pair_layouts import LAYOUTS, OUTPUTS, Case, by_layout, case, linear, linear_by_pair, random_ids
from testkit.models.tolerances import assert_close
from torch import Tensor

both_paths = pytest.mark.usefixtures("path")
# Infinities in interpreted kernels are numpy's to warn of.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
ROUNDINGS = {torch.float32: 32, torch.float16: 8}
"""A gradient passes through two matrices and one rounding between them."""


def leaves_of(it: Case, layout: str, output: str) -> list[Tensor]:
    """x, w, bias, and the gates if they are used."""
    gates = [it.gates_TK] if output == "gates" else []
    return [leaf.clone().requires_grad_() for leaf in (it.stored(layout), it.w_EOI, it.bias_EO, *gates)]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twin_by_finite_differences(layout: str, output: str) -> None:
    ids = random_ids(5, 2, 4, absent=0.2)
    it = case(ids, inputs=3, outputs=4, experts=4, dtype=torch.float64)
    leaves = leaves_of(it, layout, "gates")
    assert torch.autograd.gradcheck(lambda *tensors: linear(it, layout, output, *tensors), leaves)


def gradients(it: Case, layout: str, output: str, dy: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What parallel_linear says, and what autograd makes of the loop in float64.

    The gates' gradients, float32, are sums over rows that were rounded to x's dtype: they are as exact as that.
    """
    leaves = leaves_of(it, layout, output)
    y = linear(it, layout, output, *leaves, *([] if output == "gates" else [it.gates_TK]))
    actual = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y_SO = linear_by_pair(wide[0], wide[1], wide[2], it.ids_TK, it.plan, layout)
    want_y = by_layout(y_SO, it.plan, wide[3] if output == "gates" else None, output == "grouped")
    # An expert without rows takes no part in the loop's graph: its gradient is zero.
    want = torch.autograd.grad(want_y + sum(leaf.sum() * 0 for leaf in wide), wide, dy.to(y.dtype).double())
    return [gradient.to(it.x_TI.dtype) for gradient in actual], list(want)


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_the_loops(layout: str, output: str, dtype: torch.dtype) -> None:
    # The narrower side is the one that is weighed: both get their turn.
    inputs, outputs = (24, 17) if dtype == torch.float32 else (9, 16)
    it = case(random_ids(21, 3, 5, absent=0.2), inputs=inputs, outputs=outputs, experts=5, dtype=dtype)
    dy = torch.randn(21 if output == "gates" else 63, outputs, generator=torch.Generator().manual_seed(1))
    for actual, want in zip(*gradients(it, layout, output, dy), strict=True):
        assert_close(actual, want, ROUNDINGS[dtype])


@both_paths
@pytest.mark.parametrize("ids", [[[3]] * 33, [[2, 0]] * 9, [[9, -1]] * 2], ids=["one expert", "two of four", "none"])
def test_uneven_experts(ids: list[list[int]]) -> None:
    it = case(ids, inputs=8, outputs=8, experts=4, dtype=torch.float32)
    for layout in LAYOUTS:
        dy = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(1))
        for actual, want in zip(*gradients(it, layout, "gates", dy), strict=True):
            assert_close(actual, want, 32)


@both_paths
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_dropped_pairs_get_zero_gradients(layout: str, output: str) -> None:
    it = case(random_ids(9, 2, 4, absent=0.4), inputs=8, outputs=8, experts=4, dtype=torch.float32)
    dropped_S = it.plan.place_S < 0
    assert dropped_S.any()
    rows = 9 if output == "gates" else 18
    (dx, *_, dlast), _ = gradients(it, layout, output, torch.ones(rows, 8))
    if layout == "pair":
        assert (dx[dropped_S] == 0).all()
    elif layout == "grouped":
        assert (dx[int(it.plan.ends_E[-1]) :] == 0).all()
    if output == "gates":
        assert (dlast.flatten()[dropped_S] == 0).all()


@both_paths
def test_nan_in_a_token_stays_with_its_experts() -> None:
    """Rows of one expert end in the middle of a block whose rest belongs to the next expert."""
    ids = torch.tensor([[0, 1]] * 5 + [[1, 2]] * 6 + [[2, 3]] * 7)
    it = case(ids, inputs=8, outputs=8, experts=4, dtype=torch.float32)
    it.x_TI[5] = torch.nan  # experts 1 and 2
    leaves = leaves_of(it, "token", "gates")
    y_TO = linear(it, "token", "gates", *leaves)
    dx, dw, dbias, dgates = torch.autograd.grad(y_TO, leaves, torch.ones_like(y_TO))
    assert dx.isfinite().all()
    assert dw[[0, 3]].isfinite().all()
    assert dw[[1, 2]].isnan().all()
    assert dbias.isfinite().all()
    assert dgates.isnan().nonzero().tolist() == [[5, 0], [5, 1]]


@both_paths
def test_nan_in_a_tokens_gradient_stays_there() -> None:
    it = case([[0, 1]] * 5 + [[1, 2]] * 6, inputs=8, outputs=8, experts=4, dtype=torch.float32)
    leaves = leaves_of(it, "token", "gates")
    y_TO = linear(it, "token", "gates", *leaves)
    dy_TO = torch.ones_like(y_TO)
    dy_TO[10] = torch.inf  # experts 1 and 2
    dx, dw, dbias, dgates = torch.autograd.grad(y_TO, leaves, dy_TO)
    assert dx[:10].isfinite().all()
    assert dw[[0, 3]].isfinite().all()
    assert dbias[[0, 3]].isfinite().all()
    assert dgates[:10].isfinite().all()


@both_paths
def test_only_what_is_asked_for() -> None:
    it = case(random_ids(6, 2, 3), inputs=8, outputs=4, experts=3, dtype=torch.float32)
    everything = leaves_of(it, "token", "gates")
    y_TO = linear(it, "token", "gates", *everything)
    want = torch.autograd.grad(y_TO, everything, torch.ones_like(y_TO))
    for at in range(4):
        leaves = [leaf.detach().clone().requires_grad_(at == index) for index, leaf in enumerate(everything)]
        y_TO = linear(it, "token", "gates", *leaves)
        (alone,) = torch.autograd.grad(y_TO, leaves[at], torch.ones_like(y_TO))
        assert torch.equal(alone, want[at])


@both_paths
def test_a_second_backward_pass_gives_the_same() -> None:
    it = case(random_ids(6, 2, 3), inputs=8, outputs=4, experts=3, dtype=torch.float32)
    leaves = leaves_of(it, "token", "gates")
    y_TO = linear(it, "token", "gates", *leaves)
    first = torch.autograd.grad(y_TO, leaves, torch.ones_like(y_TO), retain_graph=True)
    second = torch.autograd.grad(y_TO, leaves, torch.ones_like(y_TO))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@both_paths
def test_expanded_gradients() -> None:
    """``y.sum().backward()`` hands over a gradient of strides 0."""
    it = case(random_ids(6, 2, 3), inputs=8, outputs=4, experts=3, dtype=torch.float32)
    leaves = leaves_of(it, "token", "pair")
    y_SO = linear(it, "token", "pair", *leaves, it.gates_TK)
    want = torch.autograd.grad(y_SO, leaves, torch.ones_like(y_SO), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y_SO.sum(), leaves), want, strict=True))
